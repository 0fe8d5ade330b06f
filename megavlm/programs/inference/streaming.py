"""Show an answer while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

_INCOMPLETE = "\ufffd"  # what a tokenizer writes for the first bytes of a character


class Streamer:
    """Receives tokens from `generate` (Transformers' streamer protocol) and shows the text that they add.

    The whole answer is decoded each time, because spaces and characters may depend on neighbouring tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], show: Callable[[str], None]) -> None:
        self.text = ""
        self._decode, self._show = decode, show
        self._ids: list[int] = []
        self._at_prompt = True

    def put(self, value: Tensor) -> None:
        """Take the prompt, which is not shown, and then one token after the other."""
        if self._at_prompt:
            self._at_prompt = False
            return
        self._ids += value.flatten().tolist()
        text = self._decode(self._ids)
        if not text.endswith(_INCOMPLETE):
            self._extend(text)

    def end(self) -> None:
        self._extend(self._decode(self._ids))

    def _extend(self, text: str) -> None:
        if text.startswith(self.text):
            self._show(text[len(self.text) :])
            self.text = text
