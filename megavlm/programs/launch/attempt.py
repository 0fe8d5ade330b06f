"""Record the attempts of a scheduler's job and decide whether to requeue it, for launch/slurm.sbatch.

    python -m megavlm.programs.launch.attempt begin --job 17 --world 16 -- FLAGS
    python -m megavlm.programs.launch.attempt end --job 17 [--warned] -- FLAGS

`begin` prints the path for MEGAVLM_EXIT_FILE. `end` prints "again" if the job is to be requeued, followed by the
machines to exclude, if any.

FLAGS are the options of pretrain_vlm.py. `begin` exits with 2 for a configuration that cannot run, before any node is
kept busy. `end` exits with the status for the whole job. torchrun's own exit status is 1 whenever a rank does not
return 0, so the first rank that exits on its own writes its status to a file (`note_exit`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megavlm.checkpoint.folders import complete
from megavlm.command_line.configuration import configured
from megavlm.command_line.parsing import parse
from megavlm.errors import DeviceFault, UserError
from megavlm.files import replace_file
from megavlm.json_files import read_json
from megavlm.programs.launch.job import read_exit
from megavlm.resilience.events import events

_LARGEST = 2**20  # bytes of the file

End = Literal["finished", "stopped", "mistake", "bad numbers", "crash", "lost"]
_ENDS: dict[int, End] = {0: "finished", 75: "stopped", 2: "mistake", 3: "bad numbers"}


@dataclass(frozen=True)
class Attempt:
    """The outcome of one start of a job. Iterations are those of the newest complete checkpoint."""

    end: End
    began: int  # iteration of the checkpoint at its start
    saved: int  # iteration of the checkpoint at its end
    warned: bool = False  # the scheduler announced the end of the attempt, as before a time limit


@dataclass(frozen=True)
class Decision:
    """Whether to start a job again, and why; `status` is the exit status of a job that is not started again."""

    again: bool
    status: int
    reason: str


def end_of(exit_status: int | None) -> End:
    """Map the exit status of the first rank that exited on its own to how the attempt ended; None means a crash."""
    return "crash" if exit_status is None else _ENDS.get(exit_status, "crash")


def decide(attempts: Sequence[Attempt], *, max_crashes: int) -> Decision:
    """Decide whether to start a job again after the last of its attempts.

    The job is started again after a stop that its scheduler announced, after a crash and after the loss of a machine.
    It is not if more than `max_crashes` attempts crashed, or if each of the last two attempts left no newer checkpoint
    than it found: a third would do no better. Attempts that lost a machine say nothing about the run, and count for
    neither limit.
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


@dataclass(frozen=True)
class Account:
    """The attempts of one job on a run folder, kept in a file of that folder."""

    run_dir: Path
    job: str

    @classmethod
    def of(cls, flags: Sequence[str], job: str) -> Account:
        """Return the account of a job, given its options of pretrain_vlm.py."""
        return cls(Path(parse(flags).run.run_dir), job)

    @property
    def exit_file(self) -> Path:
        return self.run_dir / "jobs" / f"{self.job}.exit"

    def begin(self, *, max_crashes: int, unfinished: End | None = None) -> Decision | None:
        """Open an attempt and return None, or return the decision to end the job instead.

        A previous attempt that is still open was cut off: the scheduler restarted the job without running the end of
        its script, because a node was lost or a job with priority took its place. That attempt is closed first, and
        the job ends if the attempt was one too many. `unfinished` is how it ended; default: by the exit status of its
        ranks, else a crash.
        """
        attempts, began = self._read()
        if began is not None:
            attempts.append(self._ended(began, warned=True, end=unfinished))
            decision = decide(attempts, max_crashes=max_crashes)
            if not decision.again:
                self._write(attempts, None)
                return decision
        self.exit_file.unlink(missing_ok=True)
        self._write(attempts, self._newest())
        return None

    def end(self, *, warned: bool, max_crashes: int, end: End | None = None) -> Decision:
        """Close the open attempt and return the decision whether to start another.

        `end` is how the attempt ended; default: by the exit status of its ranks, else a crash.
        """
        attempts, began = self._read()
        attempts.append(self._ended(began or 0, warned=warned, end=end))
        self._write(attempts, None)
        return decide(attempts, max_crashes=max_crashes)

    def faulty_machines(self) -> list[str]:
        """Return the machines whose devices computed wrongly, if a device fault ended the last attempt; else none."""
        if read_exit(self.exit_file) != DeviceFault.status:
            return []
        named = [
            event["hosts"] for event in events(self.run_dir) if event.get("kind") == "mismatch" and "hosts" in event
        ]
        return [str(host).partition(".")[0] for host in named[-1]] if named else []

    def decided(self, *, max_crashes: int) -> Decision | None:
        """Return the decision after the last attempt; None if no attempt was made, or if one is still open."""
        attempts, began = self._read()
        return decide(attempts, max_crashes=max_crashes) if attempts and began is None else None

    def _ended(self, began: int, *, warned: bool, end: End | None) -> Attempt:
        return Attempt(end or end_of(read_exit(self.exit_file)), began, self._newest(), warned)

    def _newest(self) -> int:
        """Return the iteration of the newest checkpoint, 0 if there is none."""
        return max((iteration for iteration, _ in complete(self.run_dir / "checkpoints")), default=0)

    @property
    def _file(self) -> Path:
        return self.run_dir / "jobs" / f"{self.job}.json"

    def _read(self) -> tuple[list[Attempt], int | None]:
        """Return the attempts that ended, and the iteration at which an open attempt began; None if none is open.

        Raises UserError for an account file that is damaged.
        """
        if not os.path.lexists(self._file):
            return [], None
        try:
            written = read_json(self._file, at_most=_LARGEST)
            return [Attempt(**each) for each in written["attempts"]], written["open"]
        except (UserError, TypeError, KeyError) as error:
            raise UserError(
                f"{self._file}, the account of the job's attempts, is damaged ({error}): delete it"
            ) from error

    def _write(self, ended: Sequence[Attempt], began: int | None) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._file, json.dumps({"attempts": [asdict(each) for each in ended], "open": began}) + "\n")


def main(argv: Sequence[str]) -> int:
    """Run `begin` or `end`; return 0, or the exit status for the whole job if the job ends."""
    cut = argv.index("--") if "--" in argv else len(argv)
    options, flags = _parser().parse_args(argv[:cut]), argv[cut + 1 :]
    try:
        if options.when == "begin":
            configured(flags, world=options.world)
        account = Account.of(flags, options.job)
        if options.when == "begin":
            decision = account.begin(max_crashes=options.max_crashes)
            if decision is None:
                print(account.exit_file)
                return 0
        else:
            decision = account.end(warned=options.warned, max_crashes=options.max_crashes)
    except (UserError, OSError) as error:
        print(f"job {options.job} does not start: {error}", file=sys.stderr)
        return error.status if isinstance(error, UserError) else 2
    print(f"job {options.job} {'is started again' if decision.again else 'ends'}: {decision.reason}", file=sys.stderr)
    if decision.again:
        machines = account.faulty_machines()
        print(" ".join(["again", *([",".join(machines)] if machines else [])]))
        return 0
    return decision.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Keep account of the attempts of a scheduler's job.")
    parser.add_argument("when", choices=("begin", "end"), help="Whether an attempt begins, or has ended.")
    parser.add_argument("--job", required=True, help="The scheduler's number of the job, the same for all attempts.")
    parser.add_argument("--world", type=int, default=1, metavar="N", help="Number of processes; for `begin`.")
    parser.add_argument("--warned", action="store_true", help="The scheduler announced the end of the attempt.")
    parser.add_argument(
        "--max-crashes", type=int, default=10, metavar="N", help="Crashes that are answered by a new attempt."
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
