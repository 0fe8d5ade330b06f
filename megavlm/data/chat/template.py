"""Render chat templates with Jinja and Transformers' variables, in a process with limits on time and memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from megavlm.data.chat import template_process

Message = Mapping[str, Any]
EMPTY_THOUGHTS = "<think></think>"


class TemplateError(ValueError):
    """Raised if a chat template has an error or refuses a conversation."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the variables that it may use: special tokens (`bos_token`, …) and `enable_thinking`.

    `silence` is the text before an answer, and empty thoughts that the template writes behind that text in the
    generation prompt alone (Gemma 4). They are added before answers without thoughts, which follow that prompt.
    """

    source: str
    specials: tuple[tuple[str, str | bool], ...] = ()
    silence: tuple[str, str] | None = None

    def render(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        """Render a conversation and return its text; `generate` adds the generation prompt, which precedes an answer.

        Raises TemplateError.
        """
        text, error = _RENDERER.ask([self.source, dict(self.specials), list(messages), generate])
        if text is None:
            raise TemplateError(error if error.isprintable() else ascii(error))  # a template may say anything
        if self.silence is not None:
            header, thoughts = self.silence
            mark = thoughts.partition(">")[0]
            text = re.sub(f"{re.escape(header)}(?!{re.escape(mark)})", lambda found: found[0] + thoughts, text)
        return text.replace(f"{EMPTY_THOUGHTS}<think>", "<think>")  # Kimi's writes them before an answer with thoughts


class _Renderer:
    """The rendering process, started at the first request. Threads take turns; a forked process starts its own."""

    _process: subprocess.Popen[bytes] | None = None

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def ask(self, request: list[Any]) -> tuple[str | None, str]:
        """Send a request and return (text, ""), or (None, error message)."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            for _ in range(2):  # the second time for a process that someone else has ended
                reply, status = self._exchange(line)
                if reply:
                    text, error = json.loads(reply)
                    return text, error or ""
                if status == -signal.SIGPROF:
                    return None, f"it takes more than {template_process.SECONDS:g} s of processor time"
        return None, f"it ends the process that renders it (status {status})"

    def _exchange(self, line: bytes) -> tuple[bytes, int]:
        """Return (reply, 0), or (b"", exit status) if the process has ended."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        if reply.endswith(b"\n"):
            return reply, 0
        self._process = None
        process.stdout.close()
        return b"", process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(template_process.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process = process
        return process

    def _forget(self) -> None:
        self._lock = Lock()
        self._process = None


_RENDERER = _Renderer()
