"""Servers of object stores on loopback: moto's S3 and an emulator of Google Cloud Storage."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from typing import ClassVar


class _Server:
    """A server that speaks a protocol, as a process; `needs` are modules, `address` is host:port."""

    def __init__(self, command: list[str], port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                assert self._process.poll() is None, f"{command} ended"
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def request(self, method: str, path: str, body: str = "") -> None:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status < 300, answer.read()
        connection.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class S3(_Server):
    needs: ClassVar[tuple[str, ...]] = ("s3fs", "moto", "flask")
    protocol: ClassVar[str] = "s3"

    def __init__(self) -> None:
        port = _free_port()
        super().__init__([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)

    def env(self, url: str) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": "key-of-nobody", "AWS_SECRET_ACCESS_KEY": "secret-of-nobody"}
        return {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1", **keys}

    def make_bucket(self, name: str) -> None:
        self.request("PUT", f"/{name}")


class GoogleCloudStorage(_Server):
    needs: ClassVar[tuple[str, ...]] = ("gcsfs", "gcp_storage_emulator")
    protocol: ClassVar[str] = "gs"

    def __init__(self) -> None:
        port = _free_port()
        start = f"from gcp_storage_emulator.server import create_server as s; s('127.0.0.1', {port}, True).run()"
        super().__init__([sys.executable, "-c", start], port)

    def env(self, url: str) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": url, "GOOGLE_CLOUD_PROJECT": "nobody"}

    def make_bucket(self, name: str) -> None:
        self.request("POST", "/storage/v1/b?project=nobody", json.dumps({"name": name}))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


EMULATORS: dict[str, type[S3] | type[GoogleCloudStorage]] = {"gcs": GoogleCloudStorage, "s3": S3}
