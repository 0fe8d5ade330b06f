"""Readers of the files of a run and of the planner: configuration, metrics, events, status, lock, profiles."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
import yaml
from safetensors.torch import save

from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.metrics.callback import StepEnd, Stop
from megavlm.metrics.sinks import JsonlSink
from megavlm.pipeline.feature_cache import FeatureCache
from megavlm.planner.hardware import PROFILES, profile
from megavlm.programs import goodput, why
from megavlm.programs import plan as planner
from megavlm.resilience.lock import RunLock
from megavlm.resilience.status import read_status, write_status
from tests.fuzz.child import Reader

EVENTS = [
    {"time": "2026-11-22T08:00:00.000+00:00", "kind": "start", "attempt": 0, "rank": 0, "iteration": 0, "world": 2},
    {"time": "2026-11-22T08:01:00.000+00:00", "kind": "save", "attempt": 0, "rank": 0, "iteration": 5, "seconds": 1.5},
    {"time": "2026-11-22T08:02:00.000+00:00", "kind": "hang", "attempt": 0, "rank": 1, "reason": "r", "seconds": 9.0},
    {"time": "2026-11-22T08:03:00.000+00:00", "kind": "start", "attempt": 1, "rank": 0, "iteration": 5},
    {"time": "2026-11-22T08:04:00.000+00:00", "kind": "finish", "attempt": 1, "rank": 0, "iteration": 9},
]
STEPS = [
    {
        "iteration": number + 1,
        "loss": 2.0,
        "step_time_s": 1.0,
        "data_time_s": 0.1,
        "updated": True,
        "phase_seconds": {"data": 0.1, "compute": 0.7, "pipeline wait": 0.1, "communication": 0.1},
        "slowest_rank": 1,
        "slowest_rank_s": 0.9,
        "slowest_rank_excess": 0.4,
        "slowest_rank_phase": "compute",
        "slow": "rank 1",
    }
    for number in range(4)
]


def lines(values: list[dict]) -> bytes:
    return b"\n".join(json.dumps(value).encode() for value in values) + b"\n"


def run_config(folder: Path, data: bytes) -> None:
    (folder / "config.yaml").write_bytes(data)
    parse(["--config", str(folder / "config.yaml")])


def past(folder: Path, data: bytes, *, name: str) -> None:
    """Ask `tools/why.py` and `tools/goodput.py` about a run of which one file is `data`."""
    (folder / "metrics.jsonl").write_bytes(lines(STEPS))
    (folder / "events.jsonl").write_bytes(lines(EVENTS))
    (folder / name).write_bytes(data)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        assert why.main([str(folder)]) in (0, 2)
        assert goodput.main([str(folder), "--out", str(folder / "page.html"), "--json"]) in (0, 2)
    assert len(out.getvalue()) < 50_000


def events(folder: Path, data: bytes) -> None:
    past(folder, data, name="events.jsonl")


def metrics(folder: Path, data: bytes) -> None:
    past(folder, data, name="metrics.jsonl")
    sink = JsonlSink(folder / "metrics.jsonl", resume_iteration=3)
    sink.on_step_end(StepEnd({"iteration": 4}))
    sink.on_stop(Stop(0, "finished"))


def status(folder: Path, data: bytes) -> None:
    (folder / "status.json").write_bytes(data)
    write_status(folder, "running", iteration=3)
    assert read_status(folder)["iteration"] == 3


def lock(folder: Path, data: bytes) -> None:
    (folder / "lock").write_bytes(data)
    held = RunLock(folder)
    with patch("megavlm.resilience.lock._SILENCE", 0.0):  # an owner on another machine is not waited for
        held.acquire()
    held.release()


def hardware(folder: Path, data: bytes) -> None:
    """Plan with a hardware profile as `tools/calibrate.py` writes it."""
    (folder / "profile.json").write_bytes(data)
    found = profile(str(folder / "profile.json"))
    assert asdict(found)
    options = ["--model", "qwen2_5_vl_7b", "--gpus", "8", "--gpu", str(folder / "profile.json"), "--top", "1"]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        ended = planner.main([*options, "--placement", "stages", "--recompute", "full", "--no-offload"])
    if ended == 2:
        raise UserError(out.getvalue().strip().splitlines()[-1])


KEY = "ab" * 32


@cache
def features() -> bytes:
    return save({"features": torch.ones(2, 1, 4)}, {"sha256": "0" * 64})


def feature_cache(folder: Path, data: bytes) -> None:
    (folder / KEY[:2]).mkdir()
    (folder / KEY[:2] / f"{KEY}.safetensors").write_bytes(data)
    FeatureCache(folder, size=2**20, encoder=b"").get(KEY)


def _here() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def owners() -> list[bytes]:
    """Return locks of a process of this machine and of another one, as a run writes them."""
    here = {"host": "a", "machine": _here(), "pid": 7, "started": "9", "since": "2026-11-22T08:00:00+00:00"}
    return [json.dumps(owner).encode() for owner in (here, {**here, "machine": "b"})]


def full_config() -> bytes:
    return yaml.safe_dump(json.loads(json.dumps(asdict(Config())))).encode()


STATUS = {"state": "stopped", "reason": "SIGTERM", "time": "", "attempt": 0, "iteration": 7, "train_iters": 9}
READERS = {
    "config.yaml": Reader(run_config, lambda: [full_config(), json.dumps(asdict(Config())).encode()], few=10),
    "events.jsonl": Reader(events, lambda: [lines(EVENTS), *(lines([*EVENTS, event]) for event in EVENTS)]),
    "metrics.jsonl": Reader(metrics, lambda: [lines(STEPS)]),
    "status.json": Reader(status, lambda: [json.dumps(STATUS).encode()]),
    "hardware profile": Reader(
        hardware, lambda: [json.dumps(asdict(each)).encode() for each in PROFILES.values()], few=3
    ),
    "lock": Reader(lock, owners),
    "feature cache": Reader(feature_cache, lambda: [features()]),
}
