"""Four processes that stand for four nodes: all is measured, a slow node is named, and nothing waits for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megavlm.programs.doctor.problems import EXCHANGE, WORLD, world_problems
from tests.support.forked import PATIENCE, ROOT


def surveyed() -> Any:
    """What rank 0 finds; every process is a node of its own."""
    import torch.distributed as dist

    from megavlm.parallel.rendezvous import Meeting
    from megavlm.programs.doctor.survey import Check, survey_world
    from megavlm.world import World

    met = Meeting(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
    place = World(met.rank, met.world, 0, 1)
    package = ROOT / "megavlm" / "programs" / "doctor"
    return survey_world(Check(met, limit=120), place, host=f"node{met.rank}", package=package)


def stutter(process: psutil.Process, stopped: threading.Event) -> None:
    """Let a process run for a small part of the time only."""
    while not stopped.is_set():
        process.suspend()
        time.sleep(0.05)
        process.resume()
        time.sleep(0.005)


def test_a_slow_node_is_named(pools):
    pool = pools(4)
    sound = pool.run(surveyed)[0]
    assert sound.names == ("node0", "node1", "node2", "node3")
    assert {WORLD, EXCHANGE} < set(sound.speeds)
    assert list(sound.speeds[EXCHANGE]) == [0, 1, 2, 3]
    stopped = threading.Event()
    slow = threading.Thread(target=stutter, args=(psutil.Process(pool._processes[2].pid), stopped))
    slow.start()
    try:
        found = pool.run(surveyed)[0]
    finally:
        stopped.set()
        slow.join()
    told = [problem.what for problem in world_problems(found, None)]
    assert any(what.startswith("node node2: exchange between two nodes at") for what in told), told


def doctor(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """The tool under torchrun with four processes."""
    folder.mkdir()
    agents = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    return subprocess.Popen(
        [*agents, "-m", "megavlm", "doctor", "--world", "--json", str(folder / "found.json"), *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_the_tool_reports_and_never_hangs(tmp_path: Path):
    sound = doctor(tmp_path / "sound")
    told, _ = sound.communicate(timeout=PATIENCE)
    assert sound.returncode == 0, told
    assert "all-reduce within nodes" in told
    written = json.loads((tmp_path / "sound" / "found.json").read_text())
    assert written["world"]["ranks"] == [[0, 1, 2, 3]]
    assert [problem for problem in written["problems"] if problem["level"] == "error"] == []

    stuck = doctor(tmp_path / "stuck", "--timeout", "20")
    ranks: dict[int, psutil.Process] = {}
    while len(ranks) < 4:
        assert stuck.poll() is None
        for child in psutil.Process(stuck.pid).children(recursive=True):
            if child.cmdline()[1:5] == ["-u", "-m", "megavlm", "doctor"]:
                ranks[int(child.environ()["RANK"])] = child
    ranks[3].send_signal(signal.SIGSTOP)
    try:
        told, _ = stuck.communicate(timeout=PATIENCE)
    finally:
        for child in ranks.values():
            if child.is_running():
                child.kill()
    assert stuck.returncode == 1, told
    assert "rank 3 of 4 did not a" in told, told  # answer, or arrive if it had not yet
