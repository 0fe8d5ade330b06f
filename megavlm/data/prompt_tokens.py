"""Compare the tokens that a server has for a prompt with those of training.

A prompt is a record up to its first answer. A server gets it with what the chat template writes for an image, and its
processor expands that; either form may be given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megavlm.data.prompts import answer_in
from megavlm.data.types import Conversation
from megavlm.inputs.bad_sample import BadSample

if TYPE_CHECKING:
    from megavlm.data.file_source import FilesSource

_CONTEXT = 8  # tokens on either side of a difference that are shown


@dataclass(frozen=True)
class PromptTokens:
    """The prompt of a record in both forms."""

    record: str  # as in `chat.jsonl:18`
    served: list[int]
    expanded: list[int]

    def first_difference(self, given: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str | None:
        """Return where given tokens leave the form that they follow longest, with the text there; None if none."""
        if list(given) in (self.served, self.expanded):
            return None
        forms = {"with single image tokens": self.served, "expanded": self.expanded}
        agreed = {name: _in_common(ours, given) for name, ours in forms.items()}
        name = max(agreed, key=lambda each: agreed[each])
        at, ours = agreed[name], forms[name]

        def shown(tokens: Sequence[int]) -> str:
            return repr(decode(tokens[at : at + _CONTEXT])) if at < len(tokens) else "its end"

        return (
            f"{self.record}: token {at} is {given[at] if at < len(given) else 'missing'} in place of "
            f"{ours[at] if at < len(ours) else 'the end'} (of {len(ours)} tokens {name}): after "
            f"{decode(ours[max(0, at - _CONTEXT) : at])!r} comes {shown(given)} in place of {shown(ours)}"
        )


def prompt_tokens(source: FilesSource) -> Iterator[PromptTokens]:
    """Yield the prompt of each record that has one, in the order of the source."""
    for number in range(sum(map(len, source.records))):
        with suppress(BadSample):
            turns = source.conversation(number)[0].turns
            asked = Conversation(turns[: answer_in(turns, last=False)])
            served, expanded = source.prompt_tokens(asked)
            yield PromptTokens(source.name(number)[1], served.tolist(), expanded.tolist())


def _in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(one), len(other)))
