import pytest

from megavlm.command_line.parsing import parse
from megavlm.metrics.secrets import without_secrets
from megavlm.metrics.trackers import settings_of


@pytest.mark.parametrize(
    ("told", "safe"),
    [
        (
            {"password": "x", "image_token": 7, "hf_token": "y"},
            {"password": "***", "image_token": 7, "hf_token": "***"},
        ),
        ({"a": [{"api_key": "x"}, 3]}, {"a": [{"api_key": "***"}, 3]}),
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
