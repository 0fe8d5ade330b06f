"""The real libraries, offline: wandb in its offline mode, mlflow with files; skipped where they are not installed."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.metrics import trackers
from megavlm.metrics.callback import Generation, Samples, Start, StepEnd, Stop
from megavlm.metrics.secrets import without_secrets
from megavlm.metrics.trackers import check_installed, continued_id, known_id, remember_id, settings_of
from tests.support.flags import resolved

PICTURE = np.full((8, 8, 3), 120, dtype=np.uint8)
SECRET = "0123456789abcdef0123456789abcdef01234567"


def needs(name: str) -> None:
    pytest.importorskip(name, reason=f"pip install 'megavlm[{name}]' lets this run")


def train(run_dir: Path, tracker: str, *, first: int, last: int) -> str:
    """Tell a tracker of a run's steps, in this process and without its thread; return its id."""
    argv = f"--run-dir {run_dir} --tracker {tracker} --tracker-project tests --datasets https://me:pw@host/a.json"
    config = resolved(argv.split())
    each = trackers._make(tracker, "tests", "a-run")
    each.on_start(Start(run_dir, config, first - 1, 2, "CPU"))
    said = Generation("What is it?", "a wall", "a grey wall", [PICTURE, PICTURE[:4]], "walls.jsonl:7")
    blind = Generation("Who is it?", "nobody", "somebody")
    if first == 1:
        each.on_samples(Samples(0, [said, blind]))
    for iteration in range(first, last + 1):
        each.on_step_end(StepEnd({"iteration": iteration, "loss": 1 / iteration, "mfu": None, "time": "now"}))
    each.on_samples(Samples(last, [said, blind]))
    each.on_stop(Stop(last, "finished"))
    identity = known_id(run_dir, tracker)
    assert identity is not None
    return identity


def test_an_id_is_remembered_and_a_damaged_one_is_not_used(tmp_path: Path) -> None:
    assert known_id(tmp_path, "wandb") is None
    remember_id(tmp_path, "wandb", "abc-123")
    assert known_id(tmp_path, "wandb") == continued_id(Start(tmp_path, Config(), 3, 1, "CPU"), "wandb") == "abc-123"
    assert continued_id(Start(tmp_path, Config(), 0, 1, "CPU"), "wandb") is None, "its steps are of another attempt"
    assert known_id(tmp_path, "mlflow") is None
    (tmp_path / "wandb-run-id.txt").write_text("../../etc\n")
    assert known_id(tmp_path, "wandb") is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--tracker mlflow .* pip install mlflow-skinny"):
        check_installed(["mlflow"])


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    needs("wandb")
    caplog.set_level(logging.WARNING)  # others may have lowered it
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    identity = train(tmp_path, "wandb", first=1, last=3)
    before = [{"iteration": number, "loss": number / 7} for number in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in before))
    assert train(tmp_path, "wandb", first=3, last=5) == identity
    importlib.import_module("wandb").teardown()  # waits for what is still to be written
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert not caplog.messages, "also of pictures of different sizes"
    assert all(identity in folder.name for folder in folders)  # two starts within a second: the second ends with -1
    written = b"".join(path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file())
    assert b"train/loss" in written
    (last,) = folders[-1].glob("*.wandb")  # of several, `wandb sync` may keep this alone
    assert [str(number / 7).encode() in last.read_bytes() for number in (1, 2, 3)] == [True, True, False]
    assert b"optimizer.lr" in written
    assert b"a grey wall" in written
    assert b"walls.jsonl:7" in written
    assert SECRET.encode() not in written
    assert b"me:pw" not in written
    assert list((tmp_path / "wandb").rglob("*.png"))


@pytest.mark.slow
def test_mlflow_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    needs("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    identity = train(tmp_path, "mlflow", first=1, last=3)
    assert train(tmp_path, "mlflow", first=4, last=5) == identity
    import mlflow

    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    run = client.get_run(identity)
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.lr"] == "0.001"
    assert "me:pw" not in str(run.data.params)
    history = client.get_metric_history(identity, "train/loss")
    assert [(point.step, point.value) for point in history] == [(n, 1 / n) for n in range(1, 6)]
    assert [each.path for each in client.list_artifacts(identity, "samples")] == [
        "samples/iter_0000000.json",
        "samples/iter_0000003.json",
        "samples/iter_0000005.json",
    ]
    pictures = [each.path for each in client.list_artifacts(identity, "images") if each.path.endswith(".png")]
    assert len(pictures) == 4, "two for each process"
    assert [line.partition(":")[0] for line in capfd.readouterr().err.splitlines()] == ["--tracker mlflow"] * 2


@pytest.mark.parametrize(
    ("told", "safe"),
    [
        (
            {"password": "x", "image_token": 7, "hf_token": "y"},
            {"password": "***", "image_token": 7, "hf_token": "***"},
        ),
        ({"a": [{"api_key": "x"}, 3]}, {"a": [{"api_key": "***"}, 3]}),
        (
            {"MLFLOW_TRACKING_TOKEN": "x", "DATABRICKS_TOKEN": "y"},
            {"MLFLOW_TRACKING_TOKEN": "***", "DATABRICKS_TOKEN": "***"},
        ),
        ("https://me:pw@host/data", "https://***@host/data"),
        ("s3://bucket/x.json?X-Amz-Signature=abc", "s3://bucket/x.json?***"),
        ("data/train.json,image_root=/images", "data/train.json,image_root=/images"),
        ("what is this? a wall", "what is this? a wall"),
        (1e-5, 1e-5),
        (None, None),
    ],
)
def test_secrets_are_left_out(told: object, safe: object) -> None:
    assert without_secrets(told) == safe


def test_values_of_the_environment_are_left_out_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("SOME_PASSWORD", "short")  # might be a word
    assert without_secrets("got 0123456789abcdef, short") == "got ***, short"


def test_options_for_a_tracker_are_whole_and_without_secrets() -> None:
    argv = "--datasets https://me:pw@host/a.json,weight=2 --run-dir runs/x --tracker wandb --lr 1e-5"
    settings = settings_of(parse(argv.split()))
    assert settings["optimizer.lr"] == 1e-5
    assert settings["data.datasets"][0]["path"] == "https://***@host/a.json"
    assert settings["data.datasets"][0]["weight"] == 2
    assert settings["logging.tracker"] == ["wandb"]
