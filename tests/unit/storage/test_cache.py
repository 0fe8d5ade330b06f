"""Copies of what URLs name: made once, and made anew when the place changes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megavlm.errors import UserError
from megavlm.storage import cache
from megavlm.storage.cache import local_path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGAVLM_CACHE", str(tmp_path / "cache"))
    as_another_process()
    return tmp_path / "cache"


def as_another_process() -> None:
    """Forget what this process knows."""
    cache._copied.cache_clear()


def place(tmp_path: Path, name: str, size: int = 1000) -> str:
    folder = tmp_path / name
    (folder / "deep").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w" * size)
    for unused in ("model.bin", "modeling.py", "deep/other.json"):
        (folder / unused).write_text("")
    return f"file://{folder}"


def test_a_folder_is_copied_once_without_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = place(tmp_path, "a")
    folder = local_path(url, "--init-from")
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    as_another_process()
    assert local_path(url, "--tokenizer") == folder
    assert capsys.readouterr().out.count("copies") == 1
    as_another_process()
    (tmp_path / "a/model.safetensors").write_bytes(b"x" * 1000)
    os.utime(tmp_path / "a/model.safetensors", (1, 1))
    assert (local_path(url, "--init-from") / "model.safetensors").read_bytes() == b"x" * 1000
    assert (folder / "model.safetensors").read_bytes() == b"w" * 1000  # who reads the old one goes on
    assert local_path(str(tmp_path / "a"), "--init-from") == tmp_path / "a"


def test_a_file_is_copied_alone(tmp_path: Path) -> None:
    url = place(tmp_path, "a")
    assert local_path(f"{url}/config.json", "--tokenizer").read_text() == "{}"
    for name in ("modeling.py", "nothing.json", "nothing"):
        with pytest.raises(UserError, match="--tokenizer"):
            local_path(f"{url}/{name}", "--tokenizer")


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda folder: SimpleNamespace(free=900))
    with pytest.raises(UserError, match=r"--init-from file://\S+ needs .* set MEGAVLM_CACHE to a folder"):
        local_path(place(tmp_path, "a"), "--init-from")


def test_a_copy_that_is_cut_short_is_made_again(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = place(tmp_path, "a")

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(cache, "move", killed)
        with pytest.raises(KeyboardInterrupt):
            local_path(url, "--init-from")
    assert not [each for each in home.iterdir() if each.is_dir()]
    as_another_process()
    assert (local_path(url, "--init-from") / "config.json").exists()
