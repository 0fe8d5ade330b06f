"""Keep account of the attempts of a scheduler's job, for the job's own script (launch/slurm.sbatch).

    python -m megavlm.programs.launch.attempt begin --job 17 --world 16 -- FLAGS
    python -m megavlm.programs.launch.attempt end --job 17 [--warned] -- FLAGS

`begin` prints what MEGAVLM_EXIT_FILE is to be; `end` prints "again" if the job is requeued, and then machines that are
to be left out.

FLAGS are those of pretrain_vlm.py. `begin` ends with 2 for a configuration that cannot run, before any node is kept
busy. `end` ends with the status that the job should end with. torchrun cannot say what happened, since it ends with 1
whenever a rank does not return 0, so the first rank that ends by itself writes its status to a file (`exit_file`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megavlm.command_line.parsing import parse
from megavlm.errors import DeviceFault, UserError
from megavlm.programs.configuration import configured
from megavlm.programs.launch.exit_file import read_exit
from megavlm.programs.launch.job_file import JobFile
from megavlm.programs.launch.requeue import Attempt, Decision, End, decide, end_of
from megavlm.resilience.events import events


@dataclass(frozen=True)
class Account:
    """The attempts of one job on a run folder, and of the store that its checkpoints are copied to, if there is one."""

    run_dir: Path
    job: str
    store: str | None = None

    @classmethod
    def of(cls, flags: Sequence[str], job: str) -> Account:
        """Return the account of a job, given the flags of pretrain_vlm.py."""
        config = parse(flags)
        return cls(Path(config.run.run_dir), job, config.checkpoint.checkpoint_dir)

    @property
    def exit_file(self) -> Path:
        return self.run_dir / "jobs" / f"{self.job}.exit"

    def begin(self, *, max_crashes: int, unfinished: End | None = None) -> Decision | None:
        """Open an attempt; return the decision not to, if the one before never ended and is one too many.

        A job is started again without a word of its script where a node is lost or a job with priority takes its place.
        `unfinished` says what such an attempt counts as; default: what its ranks left, else a crash.
        """
        history, stored = self._file.read(), self._file.newest_stored()
        attempts, newest = list(history.ended), max(self._file.newest_here(), stored or 0)
        if history.began is not None:
            attempts.append(self._ended(history.began, warned=True, end=unfinished))
        if attempts and stored is not None:  # what was lost with a disk, the last attempt did not leave behind
            attempts[-1] = replace(attempts[-1], saved=min(attempts[-1].saved, newest))
        if history.began is not None:
            decision = decide(attempts, max_crashes=max_crashes)
            if not decision.again:
                self._file.write(attempts, None)
                return decision
        self.exit_file.unlink(missing_ok=True)
        self._file.write(attempts, newest)
        return None

    def end(self, *, warned: bool, max_crashes: int, end: End | None = None) -> Decision:
        """Close the open attempt and return whether there is to be another.

        `end` says how it ended; default: what its ranks left, else a crash.
        """
        history = self._file.read()
        attempts = [*history.ended, self._ended(history.began or 0, warned=warned, end=end)]
        self._file.write(attempts, None)
        return decide(attempts, max_crashes=max_crashes)

    def faulty_machines(self) -> list[str]:
        """Return the machines whose devices computed wrongly, if that is what ended the last attempt."""
        if read_exit(self.exit_file) != DeviceFault.status:
            return []
        named = [
            event["hosts"] for event in events(self.run_dir) if event.get("kind") == "mismatch" and "hosts" in event
        ]
        return [str(host).partition(".")[0] for host in named[-1]] if named else []

    def decided(self, *, max_crashes: int) -> Decision | None:
        """Return the decision after the last attempt; None if there was none, or if it is still open."""
        history = self._file.read()
        return decide(history.ended, max_crashes=max_crashes) if history.ended and history.began is None else None

    def _ended(self, began: int, *, warned: bool, end: End | None) -> Attempt:
        newest = max(self._file.newest_here(), self._file.newest_stored() or 0)
        return Attempt(end or end_of(read_exit(self.exit_file)), began, newest, warned)

    @property
    def _file(self) -> JobFile:
        return JobFile(self.run_dir, self.job, self.store)


def main(argv: Sequence[str]) -> int:
    """Return 0, or the exit status with which the job is to end."""
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
    except UserError as error:
        print(f"job {options.job} does not start: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        print(f"job {options.job}: --run-dir cannot be written: {error}", file=sys.stderr)
        return 2
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
