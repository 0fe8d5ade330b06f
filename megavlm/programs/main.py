"""`megavlm COMMAND …`: one program with all commands of the package, which also works outside a clone."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megavlm import __version__
from megavlm.config.messages import did_you_mean, plain

# Each command with its module and a line of help.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": (
        "megavlm.programs.train",
        "Train; on several devices: torchrun --nproc-per-node N -m megavlm train …",
    ),
    "plan": ("megavlm.programs.plan", "Find the fastest layout of a model on a number of GPUs."),
    "convert": ("megavlm.programs.convert", "Export to Hugging Face, merge adapters, compare logits."),
    "migrate": ("megavlm.programs.migrate", "Convert the configuration of another trainer, and say what differs."),
    "compare": ("megavlm.programs.compare", "Name the first layer where two models diverge."),
    "chat": ("megavlm.programs.chat", "Talk to a trained model in the terminal."),
    "evaluate": ("megavlm.programs.evaluation.evaluate", "Score a trained model on questions about images."),
    "embed": ("megavlm.programs.embed", "Write the vectors of texts and images."),
    "logprobs": ("megavlm.programs.logprobs", "Write the log-probability of each trained token."),
    "preview": ("megavlm.programs.preview", "Show the training data of a run as a page."),
    "channels": ("megavlm.programs.channels", "Measure the channels of images that are not RGB."),
    "prepare": ("megavlm.programs.prepare", "Write a data set as WebDataset tars."),
    "doctor": ("megavlm.programs.doctor.doctor", "Check this machine, and name the command that fixes each problem."),
    "launch": ("megavlm.programs.launch.launch", "Start a run on many machines."),
    "sweep": ("megavlm.programs.sweep.sweep", "Train the variants of a run, on a cluster or here, and compare them."),
    "why": ("megavlm.programs.why", "Say what holds a run back."),
    "goodput": ("megavlm.programs.goodput", "Say where the time of runs went."),
    "report": ("megavlm.programs.report", "Compare runs on one page."),
    "checkpoint": ("megavlm.programs.checkpoint", "List, verify and show checkpoints."),
    "calibrate": ("megavlm.programs.calibrate", "Measure this machine for the planner."),
}
_NO_TEARDOWN = ("train", "calibrate", "doctor", "logprobs")


def program() -> NoReturn:
    """Run the command that the first argument names and exit with its status."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        sys.argv = [f"megavlm {name}", *rest]
        run(lambda argv: importlib.import_module(COMMANDS[name][0]).main(argv), teardown=name not in _NO_TEARDOWN)
    run(lambda argv: _other(name))


def run(main: Callable[[Sequence[str]], int], *, teardown: bool = True) -> NoReturn:
    """Run a command with the arguments of the command line and exit with its status.

    If the reader of its output stops early, as `head` does, or after Ctrl-C, the command ends of the signal, without a
    message. Without `teardown`, the process exits without the interpreter's teardown: during it, gloo's threads
    sometimes abort, which would change the status, and after an error the interpreter might wait for processes and
    threads that still run.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    escape_unprintable()
    try:
        os.getcwd()
    except FileNotFoundError:
        print("the working directory was removed: change to one that is there", file=sys.stderr, flush=True)
        os._exit(2)
    try:
        status = main(sys.argv[1:])
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:
        if teardown:
            raise
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if teardown:
        sys.exit(status)
    os._exit(status)


def _other(word: str) -> int:
    """Print the help, the version, or an error for an unknown command; return the exit status."""
    if word in ("--help", "-h", "help"):
        width = max(map(len, COMMANDS))
        print("usage: megavlm COMMAND …    (megavlm COMMAND --help has its options)\n")
        print("\n".join(f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items()))
        return 0
    if word in ("--version", "-V"):
        print(f"megavlm {__version__}")
        return 0
    hint = did_you_mean(word, COMMANDS) or f": choose one of {', '.join(COMMANDS)}"
    print(f"megavlm: unknown command {plain(word)}{hint}", file=sys.stderr)
    return 2


class _Lossy(io.FileIO):
    """A file that drops data that cannot be written, instead of raising OSError."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def escape_unprintable() -> None:
    """Let stdout and stderr escape characters that their encoding lacks (locale without UTF-8) as \\xd7 or \\u2026."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def survive_lost_output() -> None:
    """Let stdout and stderr, from now on, drop output that cannot be written instead of raising OSError."""
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Lossy(number, "w", closefd=False)), errors="backslashreplace", line_buffering=True
        )
        for number in (1, 2)
    )
