"""The hub's cache, and stores behind URLs: fetched once, moved while some fail, and refused in one line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import importlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from megavlm.errors import UserError
from megavlm.storage import cache, complaint, hub, is_url, transfer, without_secrets
from megavlm.storage import store as store_module
from megavlm.storage.cache import local_path
from megavlm.storage.store import Moved, Store, StoreError
from megavlm.storage.transfer import move, with_retries

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


VLM = ["config.json", "tokenizer.json", "model.safetensors", "preprocessor_config.json"]


@pytest.mark.parametrize("cached", [VLM[:1], VLM[:2], VLM[:3]])
def test_what_another_program_has_fetched_of_a_model_is_completed(served: Hub, monkeypatch, cached: list[str]) -> None:
    """Transformers fetches configuration, tokenizer, model and processor one by one; without the hub they are all."""
    served.repositories["acme/vlm"] = dict.fromkeys(VLM, b'{"vision_config": {}}')
    folder = hub._Fetch(hub.repository("acme/vlm", "")).files(cached)
    with monkeypatch.context() as offline:
        offline.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert cache.local_path("acme/vlm", "--init-from", weights=VLM[2] in cached) == folder
    cache._from_hub.cache_clear()
    assert cache.local_path("acme/vlm", "--tokenizer", weights=False) == folder
    assert (folder / VLM[1]).exists()
    assert (folder / VLM[3]).exists()


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
    Path("README.md").write_text(CARD)  # of the folder in which the run is started
    served.repositories["datasets/acme/bare"] = {"train.csv": b"3"}
    (file,) = cache.local_path("acme/bare", "--datasets").iterdir()
    assert file.read_bytes() == b"3"
    served.repositories.clear()
    cache._from_hub.cache_clear()
    assert cache.local_path("acme/plain", "--datasets") == folder


@pytest.mark.parametrize(
    ("card", "names", "expected"),
    [
        ("", ["train2014.json", "val2014.json"], ["train2014.json"]),
        ("", ["1.parquet", "test1.parquet"], ["1.parquet"]),
        ("", ["all.json", "config.json"], ["all.json"]),
        ("configs:\n- data_dir: data", ["data/test.csv", "data/train.csv", "train.csv"], ["data/train.csv"]),
        ("configs:\n- sep: x", ["test.csv", "train.csv"], ["train.csv"]),
        ("configs:\n- data_files: '*.csv'", ["a.csv", "old/b.csv"], ["a.csv"]),
        (
            "configs:\n- data_files: ./d/**/[!x]?.csv",
            ["d/a0.csv", "d/e/b1.csv", "d/x0.csv"],
            ["d/a0.csv", "d/e/b1.csv"],
        ),
    ],
)
def test_files_are_chosen_by_name_as_datasets_does(card: str, names: list[str], expected: list[str], tmp_path: Path):
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    data = hub.repository("acme/data", "--datasets", is_data=True)
    assert hub._chosen(data, names, tmp_path) == expected


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


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")
    with pytest.raises(UserError, match="is a pointer of git-lfs and not the file: run `git lfs pull`"):
        cache.local_path(str(tmp_path), "--init-from")
    (tmp_path / "model.safetensors").write_bytes(b"w" * 1000)
    assert cache.local_path(str(tmp_path), "--init-from") == tmp_path
    monkeypatch.setattr(Path, "iterdir", None)  # a folder without pointers is looked through once
    assert cache.local_path(str(tmp_path), "--init-from") == tmp_path


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
    assert capsys.readouterr().out.count("copying") == 1
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


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no home."""
    monkeypatch.setenv("MEGAVLM_CACHE", "/proc/none")
    with pytest.raises(UserError, match=r"--init-from file://\S+ needs the cache /proc/none, which cannot be written"):
        local_path(place(tmp_path, "a"), "--init-from")


def test_a_cache_without_locks_is_locked_elsewhere(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, locked = fcntl.flock, list[str]()

    def refusing(file: int, operation: int) -> None:
        if (place := os.readlink(f"/proc/self/fd/{file}")).startswith(str(home)):
            raise OSError(errno.ENOSYS, "Function not implemented")
        locked.append(place)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", refusing)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert (local_path(place(tmp_path, "a"), "--init-from") / "config.json").exists()
    assert [Path(each).parent for each in locked] == [tmp_path]


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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_FIRST_PAUSE", 0.001)


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    yield Store.at(f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/store")
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://key:secret@bucket/run", "password"),
        ("s3://bucket/run?X-Amz-Signature=abc", "signature"),
        ("simplecache::s3://bucket/run", "chains"),
        ("gs://bucket/../other", "whole URL"),
        ("gs://", "names no bucket"),
    ],
)
def test_urls_that_would_not_do_what_they_seem_to_are_refused(url: str, words: str) -> None:
    assert words in (complaint(url.replace("simplecache::s3", "s3://a::s3")) or "")
    with pytest.raises(UserError) as refused:
        Store.at(url)
    assert "secret" not in str(refused.value)
    assert "abc" not in str(refused.value)


def test_urls_and_paths_are_told_apart() -> None:
    assert all(map(is_url, ("gs://b/x", "s3://b", "file:///tmp/x", "memory://x")))
    assert not any(map(is_url, ("runs/x", "/data/a:b", "C:/x", "gs:/b", "")))
    assert complaint("gs://bucket/run-1/a.b") is None
    assert complaint("abfss://container@account.dfs.core.windows.net/run") is None
    assert complaint("abfss://container:secret@account.dfs.core.windows.net/run") is not None


def test_messages_of_libraries_lose_what_may_be_secret() -> None:
    said = "403, url='https://user:pw@host/o?uploadType=x&upload_id=TOKEN' refused"
    assert without_secrets(said) == "403, url='https://host/o refused"


def test_a_protocol_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = importlib.import_module("fsspec.registry")
    monkeypatch.setitem(registry.known_implementations, "gs", {"class": "not.there.GCS", "err": "Please install"})
    monkeypatch.delitem(registry._registry, "gs", raising=False)
    with pytest.raises(UserError, match=r"pip install gcsfs"):
        Store.at("gs://bucket/run")


def test_files_come_back_as_they_went(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 100)
    assert store.files() == {}
    moved: list[int] = []
    store.upload(tmp_path / "a", "deep/er/a", moved.append)
    store.below("deep").write("b", b"xyz")
    assert store.files() == {"deep/er/a": 25600, "deep/b": 3}
    assert sum(moved) == 25600
    store.below("deep").download("er/a", tmp_path / "back/a")
    assert (tmp_path / "back/a").read_bytes() == (tmp_path / "a").read_bytes()
    assert b"".join(store.pieces("deep/er/a")) == (tmp_path / "a").read_bytes()
    assert store.read("deep/b", at_most=3) == b"xyz"
    with pytest.raises(StoreError, match="more than 2"):
        store.read("deep/b", at_most=2)
    with pytest.raises(StoreError, match="no/such cannot be read") as missing:
        store.read("no/such", at_most=10)
    assert missing.value.final
    store.remove("deep/b")
    store.remove("deep/b")
    store.below("deep").remove_all()
    store.below("deep").remove_all()
    assert store.files() == {}


def test_what_fails_is_tried_again_and_what_cannot_succeed_is_not() -> None:
    calls: dict[str, int] = {}

    def act(name: str, moved: Moved) -> None:
        calls[name] = calls.get(name, 0) + 1
        if name == "gone":
            raise StoreError("no such file", final=True)
        if calls[name] < transfer.ATTEMPTS:
            raise StoreError("503")
        moved(10)

    assert move(["a", "b", "c"], act) == 30
    assert set(calls.values()) == {transfer.ATTEMPTS}
    with pytest.raises(StoreError, match="no such file"):
        move(["gone"], act)
    assert calls["gone"] == 1

    def refused() -> None:
        calls["refused"] = calls.get("refused", 0) + 1
        raise StoreError("503")

    with pytest.raises(StoreError, match="503"):
        with_retries(refused)
    assert calls["refused"] == transfer.ATTEMPTS


def test_what_is_on_its_way_arrives_before_a_failure_is_told() -> None:
    slow, arrived = threading.Event(), []

    def act(name: str, moved: Moved) -> None:
        if name == "fails":
            slow.wait()
            raise StoreError("no", final=True)
        slow.set()
        time.sleep(0.2)
        arrived.append(name)

    with pytest.raises(StoreError, match="no"):
        move(["slow", "fails"], act)
    assert arrived == ["slow"]


def test_a_store_that_does_not_answer_is_given_up() -> None:
    waits = threading.Event()

    def act(name: str, moved: Moved) -> None:
        waits.wait(60)

    began = time.monotonic()
    with pytest.raises(StoreError, match="nothing has moved"):
        move(["a"], act, patience=0.5)
    waits.set()
    assert time.monotonic() - began < 30


class _Answers(BaseHTTPRequestHandler):
    """Sends to another name of this host, drips one tag after another, has folders in folders without end, or says
    that its answer is compressed.
    """

    def do_GET(self) -> None:
        if any(word in self.path for word in ("folders", "linked", "packed")):
            packed = "packed" in self.path
            answer = gzip.compress(bytes(2**20)) if packed else b'<a href="deeper/">x</a><a href="a.json">x</a>'
            answer = b'<a href="sized.json">the only file</a>' if "linked" in self.path else answer
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(answer)))
            self.send_header("Last-Modified", self.date_time_string(0))
            if packed:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(answer)
            return
        if "elsewhere" in self.path:
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/stolen")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(20 if "drips" in self.path else 1):
                self.wfile.write(b'<a href="x">')
                time.sleep(0.1)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        return


def test_answers_by_http_are_bounded_and_come_from_their_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setitem(store_module._HTTP_LIMITS, "total", 1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    with pytest.raises(StoreError, match="PermissionError: it sends to http://localhost: name") as refused:
        Store.at(f"{address}/elsewhere").files()
    assert refused.value.final
    with pytest.raises(StoreError, match="cannot be listed"):
        Store.at(f"{address}/drips").files()
    assert list(Store.at(f"{address}/folder")._entries()) == ["x"]
    assert [*Store.at(f"{address}/folders").versions()] == ["a.json"], "other folders are not looked at"
    Store.at(address).download("drips.json", tmp_path / "drips")
    assert (tmp_path / "drips").stat().st_size == 240, "a large file may take longer than any other answer"
    assert Store.at(f"{address}/linked").files() == {"sized.json": 38}, "a page of links has no sizes"
    assert os.listdir(local_path(f"{address}/linked", "--init-from")) == ["sized.json"]
    assert Store.at(f"{address}/linked").modified("sized.json").timestamp() == 0
    copied = local_path(f"{address}/packed.json", "--init-from")
    assert gzip.decompress(copied.read_bytes()) == bytes(2**20), "its size is not known"
    Store.at(address).download("packed.json", tmp_path / "packed")
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == bytes(2**20), "it comes as it is, however large"
    server.shutdown()
