"""Processes that cost a fork and no imports: multiprocessing's fork server has torch, megatron-core and the program."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parents[2]


PATIENCE = 1800  # seconds: a program that has not ended is stuck, however busy the machine is


def context() -> ForkServerContext:
    """The context whose processes are children of the one fork server; that starts with the first of them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the server must have one thread, and processes share few cores
    forking = mp.get_context("forkserver")
    forking.set_forkserver_preload(["pytest", "tests.support.preload"])
    return forking


def start_program(argv: Sequence[str], output: Path, env: Mapping[str, str] | None = None) -> BaseProcess:
    """Start `pretrain_vlm.py argv` as the leader of its own session; what it prints goes to the file `output`."""
    process = context().Process(target=run_program, args=(list(argv), str(output), env))
    process.start()
    return process


def status_of(process: BaseProcess) -> int | None:
    """Wait for a program's end; returns its exit status, None if it is stuck."""
    process.join(timeout=PATIENCE)
    return process.exitcode


def run_program(argv: list[str], output: str, env: Mapping[str, str] | None = None) -> None:
    os.environ.update(env or {})
    os.setsid()
    os.chdir(ROOT)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = ["pretrain_vlm.py", *argv]
    from megavlm.programs.train import main

    status = main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as the program: gloo's threads now and then abort the interpreter's teardown
