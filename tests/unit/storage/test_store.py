"""URLs that are refused, what a store does with files, and moving many of them while some fail."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from megavlm.errors import UserError
from megavlm.storage import complaint, is_url, transfer, without_secrets
from megavlm.storage import store as store_module
from megavlm.storage.store import Moved, Store, StoreError
from megavlm.storage.transfer import move, with_retries


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
        if "folders" in self.path or "packed" in self.path:
            packed = "packed" in self.path
            answer = gzip.compress(bytes(2**20)) if packed else b'<a href="deeper/">x</a><a href="a.json">x</a>'
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(answer)))
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
            for _ in range(40 if "drips" in self.path else 1):
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
    Store.at(address).download("packed.json", tmp_path / "packed")
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == bytes(2**20), "it comes as it is, however large"
    server.shutdown()
