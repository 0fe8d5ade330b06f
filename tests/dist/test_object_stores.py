"""Checkpoints in S3 and in Google Cloud Storage, of servers on loopback, through a proxy that refuses and cuts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megavlm.checkpoint import manifest, remote
from megavlm.programs import convert
from megavlm.storage.store import Store, StoreError
from tests.support.fault_proxy import FAULTS, FaultProxy
from tests.support.forked import PATIENCE, ROOT, start_program, status_of
from tests.support.manifests import committed
from tests.support.object_stores import EMULATORS
from tests.support.training import SHALLOW, metrics, of_kind, without_wall_time

pytestmark = pytest.mark.slow

TINY = [*SHALLOW, *"--save-interval 2 --keep-checkpoints 2".split()]


@dataclass
class Faulty:
    """A server of an object store behind a proxy, and the variables with which clients find the proxy."""

    url: str
    proxy: FaultProxy
    env: dict[str, str]

    @property
    def store(self) -> Store:
        return Store.at(self.url)


@pytest.fixture(params=sorted(EMULATORS))
def faulty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    kind = EMULATORS[request.param]
    if missing := [name for name in kind.needs if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {' and '.join(missing)}: make store-tools")
    server = kind()
    proxy = FaultProxy(server.address)
    env = server.env(proxy.url)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    _forget_connections()
    server.make_bucket("bucket")
    yield Faulty(f"{server.protocol}://bucket/runs/one", proxy, env)
    _forget_connections()
    proxy.close()
    server.close()


def _forget_connections() -> None:
    """fsspec keeps one client for equal arguments, and the address of the server is not among them."""
    from fsspec import get_filesystem_class

    for protocol in ("s3", "gs"):
        if importlib.util.find_spec({"s3": "s3fs", "gs": "gcsfs"}[protocol]) is not None:
            get_filesystem_class(protocol).clear_instance_cache()


def patiently(act: Any) -> Any:
    """What `act` returns, through a proxy that spoils a third of all requests."""
    from megavlm.storage.transfer import with_retries

    return with_retries(act)


def test_large_files_survive_faults_byte_by_byte(faulty: Faulty, tmp_path: Path) -> None:
    """Files that go in several parts, up and down, while every third request fails."""
    root = tmp_path / "run"
    sizes = enumerate((130 * 2**20, 5 * 2**20, 1000))
    tensors = {f"__{number}_0.distcp": os.urandom(size) for number, size in sizes}
    folder = committed(root, 100, {**tensors, "megavlm.json": "{}"}, attempt="a")
    done: set[str] = set()
    for _ in range(5):  # as the process beside training does
        try:
            remote.upload(folder, faulty.store, done=done)
            break
        except StoreError:
            continue
    (there,) = patiently(lambda: remote.complete_in(faulty.store))
    sums = patiently(there.sums)
    remote.download(there, tmp_path / "other", sums, sums)
    copied = patiently(lambda: remote.commit_download(there, tmp_path / "other"))
    assert manifest.damage(copied) is None
    for file in folder.iterdir():
        assert (copied / file.name).read_bytes() == file.read_bytes()
    assert set(FAULTS) <= faulty.proxy.counts.keys()


def test_a_run_loses_nothing_when_requests_fail_and_it_is_killed(faulty: Faulty, tmp_path: Path) -> None:
    """Killed while it copies; its disk is lost; it goes on on a new one, and so on to its end."""
    argv = [*TINY, "--train-iters", "60"]
    whole = tmp_path / "whole"
    assert status_of(start_program([*argv, "--run-dir", str(whole)], tmp_path / "output")) == 0
    run_dir = tmp_path / "run"
    argv += ["--run-dir", str(run_dir), "--checkpoint-dir", faulty.url]
    process = start_program(argv, tmp_path / "output", faulty.env)
    deadline = time.monotonic() + PATIENCE
    while not of_kind(run_dir, "upload"):
        assert process.is_alive(), (tmp_path / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    there = patiently(lambda: remote.complete_in(faulty.store))
    assert there
    first = max(each.iteration for each in there)
    shutil.rmtree(run_dir)

    assert status_of(start_program(argv, tmp_path / "output", faulty.env)) == 0, (tmp_path / "output").read_text()
    (download,) = of_kind(run_dir, "download")
    assert download["iteration"] >= first
    expected = [record for record in metrics(whole) if record["iteration"] > download["iteration"]]
    assert without_wall_time(metrics(run_dir)) == without_wall_time(expected)
    there = patiently(lambda: remote.complete_in(faulty.store))
    assert [each.iteration for each in there] == [58, 60]
    for each in there:
        assert patiently(lambda each=each: remote.damage(each)) is None
    assert "secret" not in (run_dir / "events.jsonl").read_text() + (tmp_path / "output").read_text()


def test_a_store_that_is_down_stops_nothing(faulty: Faulty, tmp_path: Path) -> None:
    """Training ends as if there were no store; the last checkpoint waits on the disk for the next start."""
    run_dir = tmp_path / "run"
    argv = [*TINY, "--train-iters", "8", "--run-dir", str(run_dir), "--checkpoint-dir", faulty.url]
    process = start_program(argv, tmp_path / "output", faulty.env)
    deadline = time.monotonic() + PATIENCE
    while not (run_dir / "metrics.jsonl").exists():
        assert process.is_alive(), (tmp_path / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    every, faulty.proxy.every = faulty.proxy.every, 1
    while not (of_kind(run_dir, "upload_failed") and len(metrics(run_dir)) == 8):
        assert process.is_alive(), (tmp_path / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    faulty.proxy.every = every  # it is back
    assert status_of(process) == 0, (tmp_path / "output").read_text()
    assert [each.iteration for each in patiently(lambda: remote.complete_in(faulty.store))][-1] == 8


def put(folder: Path, store: Store) -> None:
    """Copy a folder of the disk into a store."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        patiently(lambda file=file: store.upload(file, str(file.relative_to(folder))))


def test_a_run_from_a_model_and_data_in_a_store_is_that_from_a_disk(faulty: Faulty, tmp_path: Path) -> None:
    """From its first step to what it exports; also when it goes on."""
    from examples.first_run import small_model

    here = tmp_path / "here"
    small_model.main(here / "model")
    shutil.copytree(ROOT / "examples/first_run/images", here / "data/images")
    (here / "data/train.jsonl").write_text((ROOT / "examples/first_run/train.jsonl").read_text() * 4)
    place = faulty.store.below("inputs")
    put(here, place)
    common = "--seq-length 128 --precision fp32 --gbs 2 --num-workers 0 --save-interval 2 --train-iters".split()
    runs = tmp_path / "disk", tmp_path / "store"
    for root, run_dir, env in ((str(here), runs[0], {}), (place.url, runs[1], faulty.env)):
        env = {**env, "MEGAVLM_CACHE": str(tmp_path / "cache")}
        start = ["--init-from", f"{root}/model", "--datasets", f"{root}/data/train.jsonl"]
        for iterations in ("4", "6"):
            process = start_program([*start, *common, iterations, "--run-dir", str(run_dir)], tmp_path / "out", env)
            assert status_of(process) == 0, (tmp_path / "out").read_text()
    assert without_wall_time(metrics(runs[0])) == without_wall_time(metrics(runs[1]))
    assert len(metrics(runs[1])) == 6
    exports = [tmp_path / f"{run_dir.name}-exported" for run_dir in runs]
    for run_dir, out in zip(runs, exports, strict=True):
        assert convert.main(["export", str(run_dir), str(out)]) == 0
    names = sorted(path.name for path in exports[0].iterdir())
    assert names == sorted(path.name for path in exports[1].iterdir())
    assert all((exports[0] / name).read_bytes() == (exports[1] / name).read_bytes() for name in names)
