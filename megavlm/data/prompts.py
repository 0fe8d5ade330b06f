"""Choose validation samples as prompts, the same at every layout, at every step and after every resume.

    validation samples ─ one of each data set in turn ─ usable? ─→ the first `evaluation.sample_count` of them

The prompt of a conversation ends before the first answer that is trained: its first answer, or with `--train-on last`
its last. The prompt of a plain text is its beginning, and the rest is the reference.

`prompt_tokens` yields the prompts of an epoch, for a comparison with the tokens of an inference server. A server
receives an image as the chat template's placeholder, which its processor expands; either form can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megavlm.config.schema import Config
from megavlm.data.sample_order import in_turn
from megavlm.data.source import HeldOutPrompt
from megavlm.data.types import Conversation, EncodedSample, HeldOut, Sample, Segment, SoundRef, Turn, Visual
from megavlm.data.visuals import first_frame
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason, SkipSummary

if TYPE_CHECKING:
    from megavlm.data.file_source import FilesSource

_LOOKED_AT = 100  # most unusable samples that are tried
_SIDE = 448  # pixels of the longer side of a picture
_PICTURES = 8  # most pictures of a prompt that are shown to readers; the model receives all
_CONTEXT = 8  # tokens on either side of a difference that are shown


def choose_prompts(config: Config, source: FilesSource, samples: Sequence[HeldOut]) -> tuple[HeldOutPrompt, ...]:
    """Return `evaluation.sample_count` prompts, or fewer if there are no more. Only one rank calls it: it reads files.

    Raises UserError if none of the first samples can be used.
    """
    options = config.evaluation
    last, most = config.data.train_on == "last", options.sample_max_new_tokens
    found: list[HeldOutPrompt] = []
    refused = SkipSummary()
    for sample in islice(in_turn(samples), options.sample_count + _LOOKED_AT):
        try:
            found.append(_prompt(source, sample, last=last, most=most))
        except BadSample as error:
            refused.add([source.skipped(sample, error)])
        if len(found) == options.sample_count:
            break
    if not found:
        raise UserError(
            f"--sample-interval {options.sample_interval}: none of the first {sum(refused.counts.values())} validation "
            f"samples can be answered: {refused.message()}; or leave --sample-interval out"
        )
    return tuple(found)


def _prompt(source: FilesSource, held_out: HeldOut, *, last: bool, most: int) -> HeldOutPrompt:
    """Return a validation record as a prompt. Raises BadSample for a record that does not fit one sequence."""
    encoded = source.encode(held_out)
    if encoded.skipped:
        raise BadSample(encoded.skipped[0].reason, encoded.skipped[0].detail)
    if len(encoded.samples) != 1:
        raise BadSample(Reason.TOO_LONG, "it does not fit --seq-length as a whole")
    conversation, _ = source.conversation(held_out)
    name, label = source.name(held_out)
    label = label if label.startswith(name) else f"{name}: {label}"
    if conversation.turns[0].role == "text":
        sample, question, reference = _continued(source, held_out, encoded.samples[0], most)
        shown = conversation
    else:
        place = _answer(conversation.turns, last=last)
        shown = Conversation(conversation.turns[:place])
        sample, question = source.prompt(shown), _question(shown.turns)
        reference = _text(conversation.turns[place])
    pictures = tuple(_picture(image, max_pixels=source.max_pixels) for image in shown.images[:_PICTURES])
    if len(shown.images) > _PICTURES:
        label += f" ({len(shown.images)} images, of which {_PICTURES} are shown)"
    return HeldOutPrompt(sample, label, question, reference, pictures)


def _answer(turns: Sequence[Turn], *, last: bool) -> int:
    """Return the index of the first turn with an answer, or of the last one. Raises BadSample if there is none."""
    places = [place for place, turn in enumerate(turns) if place and turn.role == "assistant" and _text(turn)]
    if not places:
        raise BadSample(Reason.EMPTY, "the assistant answers nothing")
    return places[-1 if last else 0]


def _continued(source: FilesSource, held_out: HeldOut, encoded: EncodedSample, most: int) -> tuple[Sample, str, str]:
    """Return the beginning of a plain text as a sample and as text, and the rest of the text as the reference.

    The reference has at most `most` tokens and its end token, at most about half of the text, and no image.
    """
    sample = source.load(Segment(held_out, encoded))
    tokens = sample.tokens
    after_images = int(np.flatnonzero(np.isin(tokens, source.feature_tokens)).max(initial=-1)) + 1
    cut = max(len(tokens) - 1 - most, len(tokens) // 2, after_images)  # the last token is the end
    reference = source.decode_answer(tokens[cut:].tolist())
    if not reference:
        raise BadSample(Reason.EMPTY, "no text is left to continue with")
    begun = tokens[:cut]
    words = source.decode_answer(begun[~np.isin(begun, source.feature_tokens)].tolist())
    return replace(sample, tokens=begun, trained=np.zeros(cut, dtype=np.bool_)), words, reference


def _question(turns: Sequence[Turn]) -> str:
    """Return the question as text; several turns are lines that begin with the speaker's role."""
    if len(turns) == 1:
        return _text(turns[0])
    return "\n".join(f"{turn.speaker}: {_text(turn)}" for turn in turns)


def _text(turn: Turn) -> str:
    """Return the text of a turn; images and sounds between texts become `[image]` and `[sound]`, those at its ends are
    left out.
    """
    places = [place for place, part in enumerate(turn.parts) if isinstance(part, str) and part.strip()]
    parts = turn.parts[min(places, default=0) : max(places, default=-1) + 1]
    marks = ("[sound]" if isinstance(part, SoundRef) else "[image]" for part in parts)
    return "".join(part if isinstance(part, str) else mark for part, mark in zip(parts, marks, strict=True)).strip()


def _picture(visual: Visual, *, max_pixels: int) -> NDArray[np.uint8]:
    """Return `first_frame`, upright and reduced. Raises BadSample if it cannot be decoded."""
    picture = Image.fromarray(first_frame(visual, max_pixels=max_pixels))
    picture.thumbnail((_SIDE, _SIDE))
    return np.array(picture)


@dataclass(frozen=True)
class PromptTokens:
    """The prompt of a record: `served` with the template's image placeholders, `expanded` as the model's input."""

    record: str  # as in `chat.jsonl:18`
    served: list[int]
    expanded: list[int]

    def first_difference(self, given: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str | None:
        """Return a message about the first difference between `given` and the form with the longest common prefix.

        Returns None if `given` equals one of the forms.
        """
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
    """Yield the prompt tokens of each sample of the first epoch that has an answer, in order."""
    for number in range(sum(map(len, source.records))):
        with suppress(BadSample):
            turns = source.conversation(number)[0].turns
            asked = Conversation(turns[: _answer(turns, last=False)])
            served, expanded = source.prompt_tokens(asked)
            yield PromptTokens(source.name(number)[1], served.tolist(), expanded.tolist())


def _in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences of tokens."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(one), len(other)))
