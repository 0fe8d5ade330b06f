"""A proxy on loopback between a client and an HTTP server, which refuses some requests and cuts some connections."""

from __future__ import annotations

import http.client
import itertools
import socket
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# What may be done to a request: refused with 503; cut while its body is sent; done, but the answer is lost; done, but
# the answer is cut in the middle.
FAULTS = ("503", "cut request", "lost answer", "cut answer")
_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "date", "server")


class FaultProxy:
    """Forwards requests to `upstream` (host:port); every `every`-th request gets the next of `faults` instead."""

    def __init__(self, upstream: str, *, every: int = 3, faults: Sequence[str] = FAULTS) -> None:
        self.upstream, self.every = upstream, every
        self.counts: Counter[str] = Counter()
        self._number, self._faults = itertools.count(1), itertools.cycle(faults)
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def fault(self) -> str | None:
        """The fault of the next request."""
        with self._lock:
            found = next(self._faults) if self.every and next(self._number) % self.every == 0 else None
            self.counts[found or "passed"] += 1
            return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (ConnectionError, ValueError):
                self.close_connection = True

        def _pass(self) -> None:
            fault = proxy.fault()
            if fault == "cut request":
                self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
                return self._cut()
            body = self._body()
            if fault == "503":
                return self._answer(503, [("Content-Type", "text/plain")], b"SlowDown")
            status, headers, content = self._forward(body)
            if fault == "lost answer":
                return self._cut()
            self._answer(status, headers, content, cut=fault == "cut answer")

        def _body(self) -> bytes:
            if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return found

        def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection(proxy.upstream, timeout=60)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in (*_HOP_BY_HOP, "expect")}
            connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            answer = connection.getresponse()
            content = answer.read()
            told = [(k, v.replace(proxy.upstream, proxy.address)) for k, v in answer.getheaders()]
            if self.command == "HEAD":
                return answer.status, told, b""
            connection.close()
            return answer.status, [(k, v) for k, v in told if k.lower() not in _HOP_BY_HOP], content

        def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, *, cut: bool = False) -> None:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self._cut()

        def _cut(self) -> None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _pass

        def log_message(self, *args: Any) -> None:
            pass

    return Handler
