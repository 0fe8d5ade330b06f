"""Keep account of the attempts of a scheduler's job, for the job's own script (launch/slurm.sbatch).

    python -m megavlm.launch.attempt begin --job 17 --world 16 -- FLAGS    prints what MEGAVLM_EXIT_FILE is to be
    python -m megavlm.launch.attempt end --job 17 [--warned] -- FLAGS      prints "again" if the job is to be requeued,
                                                                           and then machines that are to be left out

FLAGS are those of pretrain_vlm.py. `begin` ends with 2 for a configuration that cannot run, before any node is kept
busy. `end` ends with the status that the job should end with. torchrun cannot say what happened, since it ends with 1
whenever a rank does not return 0, so the first rank that ends by itself writes its status to a file (`exit_file`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megavlm.checkpoint.folders import complete
from megavlm.config.cli import parse
from megavlm.errors import DeviceFault, UserError
from megavlm.launch.configuration import configured
from megavlm.launch.exit_file import read_exit
from megavlm.launch.requeue import Attempt, Decision, End, decide, end_of
from megavlm.resilience.events import events


@dataclass(frozen=True)
class Account:
    """The attempts of one job on a run folder, kept in RUN_DIR/jobs."""

    run_dir: Path
    job: str

    @property
    def exit_file(self) -> Path:
        return self.run_dir / "jobs" / f"{self.job}.exit"

    def begin(self, *, max_crashes: int, unfinished: End | None = None) -> Decision | None:
        """Open an attempt; return the decision not to, if the one before never ended and is one too many.

        A job is started again without a word of its script where a node is lost or a job with priority takes its place.
        `unfinished` says what such an attempt counts as; default: what its ranks left, else a crash.
        """
        attempts, began = self._read()
        if began is not None:
            attempts = [*attempts, self._ended(began, warned=True, end=unfinished)]
            decision = decide(attempts, max_crashes=max_crashes)
            if not decision.again:
                self._write(attempts, None)
                return decision
        self.exit_file.unlink(missing_ok=True)
        self._write(attempts, self._newest())
        return None

    def end(self, *, warned: bool, max_crashes: int, end: End | None = None) -> Decision:
        """Close the open attempt and return whether there is to be another.

        `end` says how it ended; default: what its ranks left, else a crash.
        """
        attempts, began = self._read()
        attempts = [*attempts, self._ended(began or 0, warned=warned, end=end)]
        self._write(attempts, None)
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
        attempts, began = self._read()
        return decide(attempts, max_crashes=max_crashes) if attempts and began is None else None

    def _ended(self, began: int, *, warned: bool, end: End | None) -> Attempt:
        return Attempt(end or end_of(read_exit(self.exit_file)), began, self._newest(), warned)

    def _newest(self) -> int:
        found = complete(self.run_dir / "checkpoints")
        return found[-1][0] if found else 0

    def _read(self) -> tuple[list[Attempt], int | None]:
        """Return the attempts that ended, and the iteration at which an open one began."""
        if not self._file.exists():
            return [], None
        written: dict[str, Any] = json.loads(self._file.read_text())
        return [Attempt(**each) for each in written["attempts"]], written["open"]

    def _write(self, attempts: Sequence[Attempt], began: int | None) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"attempts": [asdict(each) for each in attempts], "open": began}) + "\n")
        os.replace(temporary, self._file)

    @property
    def _file(self) -> Path:
        return self.run_dir / "jobs" / f"{self.job}.json"


def main(argv: Sequence[str]) -> int:
    """Return 0, or the exit status with which the job is to end."""
    cut = argv.index("--") if "--" in argv else len(argv)
    options, flags = _parser().parse_args(argv[:cut]), argv[cut + 1 :]
    try:
        if options.when == "begin":
            configured(flags, world=options.world)
        account = Account(Path(parse(flags).run.run_dir), options.job)
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
