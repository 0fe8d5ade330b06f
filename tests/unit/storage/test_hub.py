"""Names of the Hugging Face hub: looked up in its cache, fetched once, and refused in one line."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from megavlm.errors import UserError
from megavlm.storage import cache, hub
from megavlm.storage.cache import local_path

pytest.importorskip("huggingface_hub")

COMMIT = hashlib.sha1(b"commit").hexdigest()
CARD = """---
configs:
- config_name: charts
  data_files:
  - split: train
    path: charts/train-*
  - split: test
    path: charts/test-*
- config_name: maps
  data_files: maps/*.parquet
---
Cards have text, too.
"""


@dataclass
class Hub:
    """What a hub has, and what it was asked for."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)

    def answer(self, path: str, *, get: bool) -> tuple[int, dict[str, str], bytes]:
        path = path.partition("?")[0].lstrip("/")
        name = next((name for name in self.repositories if f"{name}/" in path), None)
        if name is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        files, rest = self.repositories[name], path.partition(f"{name}/")[2].split("/", 2)
        if path.startswith("api/") and rest[1] not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if path.startswith("api/"):
            kinds = {"revision": "rfilename", "tree": "path"}
            listed = [
                {"type": "file", kinds[rest[0]]: file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in files.items()
            ]
            data = {"id": name, "sha": COMMIT, "siblings": listed} if rest[0] == "revision" else listed
            return 200, {"Content-Type": "application/json"}, json.dumps(data).encode()
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if get:
            self.fetched.append(rest[2])
        content = files[rest[2]]
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, content = found.answer(self.path, get=self.command == "GET")
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    )
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MEGAVLM_CACHE", str(tmp_path / "copies"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    cache._from_hub.cache_clear()
    yield found
    server.shutdown()
    server.server_close()
    cache._from_hub.cache_clear()


def test_a_model_is_fetched_once_and_without_what_is_not_needed(served: Hub) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    served.repositories["acme/vlm"] = {
        "config.json": b"{}",
        "tokenizer.json": b"{ }",
        "modeling.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": b"one",
        "model-2.safetensors": b"two",
        "consolidated.safetensors": b"both",
        "onnx/config.json": b"[]",
    }
    small = cache.local_path("acme/vlm", "--tokenizer", weights=False)
    assert sorted(served.fetched) == ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert not cache.is_here("acme/vlm")
    assert cache.local_path("acme/vlm", "--init-from") == small
    assert cache.is_here("acme/vlm")
    assert {file.name for file in small.iterdir()} == {
        "config.json",
        "tokenizer.json",
        *index["weight_map"].values(),
    } | {"model.safetensors.index.json"}
    served.repositories.clear()  # what is in the cache is taken from there
    cache._from_hub.cache_clear()
    assert cache.local_path("acme/vlm", "--init-from") == small
    assert hub.commit_of("acme/vlm") == small.name, "environment.json says which weights these were"
    assert hub.commit_of(str(small)) is None


def test_a_folder_of_that_name_wins(served: Hub, tmp_path: Path) -> None:
    (tmp_path / "acme" / "vlm").mkdir(parents=True)
    assert hub.commit_of("acme/vlm") is None
    assert cache.local_path("acme/vlm", "--init-from") == Path("acme/vlm")


def test_a_data_set_has_the_files_of_its_training_split(served: Hub) -> None:
    served.repositories["datasets/acme/plain"] = {
        "README.md": b"no front matter",
        "data/train-0.parquet": b"0",
        "data/train-1.parquet": b"1",
        "data/test-0.parquet": b"2",
        "LICENSE.txt": b"text",
    }
    folder = cache.local_path("acme/plain", "--datasets")
    assert [file.read_bytes() for file in sorted(folder.iterdir())] == [b"0", b"1"]
    served.repositories["datasets/acme/cards"] = {
        "README.md": CARD.encode(),
        **{f"{name}.parquet": name.encode() for name in ("charts/train-0", "charts/test-0", "maps/all")},
        "load.py": b"raise SystemExit",
    }
    for part, expected in (("charts", b"charts/train-0"), ("maps", b"maps/all")):
        (file,) = cache.local_path(f"acme/cards/{part}", "--datasets").iterdir()
        assert file.read_bytes() == expected
    with pytest.raises(UserError, match="several configurations: name one as acme/cards/charts, of charts, maps"):
        cache.local_path("acme/cards", "--datasets")
    assert "load.py" not in served.fetched
    served.repositories.clear()
    cache._from_hub.cache_clear()
    assert cache.local_path("acme/plain", "--datasets") == folder


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("acme/nothing", "--init-from acme/nothing is neither a path on this machine nor a repository of the hub"),
        (
            "acme/gated",
            r"is gated: accept its terms at http://127.0.0.1:\d+/acme/gated, and log in with `hf auth login`",
        ),
        ("acme/pickles@v2", "has no revision v2 on the hub"),
        ("acme/pickles", r"has no \*.safetensors: what pickled weights it has are not fetched"),
    ],
)
def test_what_the_hub_refuses_is_one_line(served: Hub, place: str, message: str) -> None:
    served.repositories |= {"acme/gated": {"config.json": b"{}"}, "acme/pickles": {"config.json": b"{}", "m.bin": b""}}
    served.gated.add("acme/gated")
    with pytest.raises(UserError, match=message) as refused:
        cache.local_path(place, "--init-from")
    assert "\n" not in str(refused.value)


def test_without_the_hub_the_command_is_said_that_fetches(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="run `hf download acme/vlm --local-dir acme/vlm`"):
        cache.local_path("acme/vlm", "--init-from")
    with pytest.raises(UserError, match="run `hf download acme/vlm`"):
        cache.local_path("https://hf.co/acme/vlm/tree/main", "--init-from")
    with pytest.raises(UserError, match="run `hf download acme/data --revision v2 --repo-type dataset`"):
        cache.local_path("acme/data@v2", "--datasets")


@pytest.mark.parametrize("place", ["folder", "/a/b", "../a", "a/train.jsonl", "a/b/c.parquet", "a/b/c/d", "s3://a/b"])
def test_what_cannot_be_a_name_is_a_path(place: str) -> None:
    assert hub.repository(place, "--datasets", is_data=True) is None


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")
    with pytest.raises(UserError, match="is a pointer of git-lfs and not the file: run `git lfs pull`"):
        cache.local_path(str(tmp_path), "--init-from")


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
