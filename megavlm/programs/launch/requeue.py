"""Decide, after an attempt of a scheduler's job has ended, whether the scheduler is to start it again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

End = Literal["finished", "stopped", "mistake", "bad numbers", "crash", "lost"]
_ENDS: dict[int, End] = {0: "finished", 75: "stopped", 2: "mistake", 3: "bad numbers"}


@dataclass(frozen=True)
class Attempt:
    """What one start of a job came to. Iterations are those of the newest whole checkpoint."""

    end: End
    began: int  # iteration at which it began
    saved: int  # iteration that it left behind
    warned: bool = False  # the scheduler announced its end, as before a time limit


@dataclass(frozen=True)
class Decision:
    """Whether to start a job again, and why; `status` is the exit status of a job that is not."""

    again: bool
    status: int
    reason: str


def end_of(exit_status: int | None) -> End:
    """Return how an attempt ended whose first rank to end by itself returned this status; None: no rank did."""
    return "crash" if exit_status is None else _ENDS.get(exit_status, "crash")


def decide(attempts: Sequence[Attempt], *, max_crashes: int) -> Decision:
    """Return whether a job is started again after the last of its attempts.

    It is after a stop that its scheduler asked for, and after a crash; not if it crashed more than `max_crashes` times,
    nor if each of the last two attempts left no newer checkpoint than it found: a third would do no better. The loss of
    a machine says nothing about the run, and counts for neither.
    """
    last = attempts[-1]
    if last.end == "finished":
        return Decision(False, 0, "the run has finished")
    if last.end == "mistake":
        return Decision(False, 2, "options or data are wrong, and would be again")
    if last.end == "bad numbers":
        return Decision(False, 3, "losses or gradients are bad, and the same steps would be again")
    if last.end == "lost":
        return Decision(True, 1, f"a machine was lost or asked for; the run goes on from iteration {last.saved}")
    if last.end == "stopped" and not last.warned:
        return Decision(False, 75, f"the run was stopped by request; the same command goes on from {last.saved}")
    status = 75 if last.end == "stopped" else 1
    own = [each for each in attempts if each.end != "lost"]
    if len(own) > 1 and all(each.saved <= each.began for each in own[-2:]):
        return Decision(False, status, f"two attempts in a row left no checkpoint after iteration {last.saved}")
    if last.end == "stopped":
        return Decision(True, status, f"the run was stopped in time and goes on from iteration {last.saved}")
    crashes = sum(each.end == "crash" for each in attempts)
    if crashes > max_crashes:
        return Decision(False, status, f"{crashes} attempts crashed, more than {max_crashes}")
    return Decision(
        True, status, f"crash {crashes} of at most {max_crashes}; the run goes on from iteration {last.saved}"
    )
