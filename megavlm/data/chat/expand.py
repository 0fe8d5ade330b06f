"""Tokenize rendered text with image placeholders: tokens, loss mask, and the turns that the tokens belong to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from megavlm.data.chat.encoded import EncodedConversation, EncodedTurn
from megavlm.data.tokenizers.text import TextTokenizer
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Prompt


@dataclass(frozen=True)
class _Written:
    """A rendered conversation whose placeholders are replaced by the text of image prompts."""

    text: str
    pictures: list[tuple[int, int]]  # [start, end) characters of each image's prompt
    shifts: list[tuple[int, int]]  # (offset in the rendered text, how far the characters from there on have moved)

    def moved(self, place: int) -> int:
        """Return the offset in `text` of a character of the rendered text."""
        return place + self.shifts[bisect_right(self.shifts, place, key=itemgetter(0)) - 1][1]


def _written(stretches: Sequence[str], prompts: Sequence[Prompt], placeholder: int, image_text: str) -> _Written:
    """Return the text between placeholders (of `placeholder` characters each) joined by the prompts of the images."""
    if len(stretches) != len(prompts) + 1:
        raise BadSample(
            Reason.IMAGE_COUNT,
            f"its rendered text has {len(stretches) - 1} image placeholders for {len(prompts)} images",
        )
    parts, pictures, shifts = [stretches[0]], [], [(0, 0)]
    at = source = len(stretches[0])
    for prompt, stretch in zip(prompts, stretches[1:], strict=True):
        image = image_text.join(prompt.texts)
        parts += image, stretch
        pictures.append((at, at + len(image)))
        source += placeholder
        at += len(image)
        shifts.append((source, at - source))
        source, at = source + len(stretch), at + len(stretch)
    return _Written("".join(parts), pictures, shifts)


def expand(
    rendered: str,
    prompts: Sequence[Prompt],
    *,
    placeholder: str,
    tokenizer: TextTokenizer,
    trained: Sequence[tuple[int, int]],
    cuts: Sequence[int],
    divisible: bool = False,
) -> EncodedConversation:
    """Return the tokens of a rendered conversation, in turns.

    A run of image tokens is a single token while the text is tokenized and is repeated afterwards: its neighbours, and
    so the other tokens, are the same.

    Args:
        prompts: replace the placeholders, in order.
        trained: [start, end) characters of the rendered text with a loss; image tokens never have one.
        cuts: offsets in the rendered text at which turns end; the first turn is the opening.
        divisible: the turns are plain text, which may be split anywhere but inside an image.

    Raises BadSample if the number of placeholders differs from the number of prompts.
    """
    written = _written(rendered.split(placeholder), prompts, len(placeholder), tokenizer.image_text)
    tokens = tokenizer.encode(written.text)
    starts, ends = tokens.starts, np.maximum(tokens.ends, tokens.starts + 1)

    def covered(spans: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
        mask = np.zeros(len(tokens), dtype=np.bool_)
        for start, end in spans:
            mask |= (ends > start) & (starts < end)
        return mask

    spans = ((written.moved(start), written.moved(end)) for start, end in trained)
    ids, mask = tokens.ids, covered(spans) & ~covered(written.pictures)
    begin = tokenizer.begin
    if begin is not None and not written.text.startswith(tokenizer.specials.get("bos_token", "\0")):
        ids, mask = np.concatenate(([begin], ids)), np.concatenate(([False], mask))
        starts, ends = np.concatenate(([0], starts)), np.concatenate(([0], ends))
    if len(mask):
        mask[0] &= ids[0] != begin
    runs = [run for prompt in prompts for run in prompt.runs]
    marks = ids == tokenizer.image
    if marks.sum() != len(runs):
        raise BadSample(Reason.IMAGE_COUNT, f"its text has {marks.sum()} image tokens instead of {len(runs)}")
    last = np.maximum.accumulate(np.maximum(ends - 1, starts)) if len(ids) else ends
    bounds = [int(np.searchsorted(last, written.moved(cut))) for cut in cuts]
    if begin is not None and len(ids) and ids[0] == begin:
        bounds[0] = max(bounds[0], 1)
    images_at = np.searchsorted(last, [end - 1 for _, end in written.pictures])
    if divisible:  # each image is a turn, and so is the text after it
        firsts = np.searchsorted(starts, [start for start, _ in written.pictures])
        bounds = sorted({*bounds, *(int(first) for first in firsts), *(int(end) + 1 for end in images_at)})
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[marks] = runs
    own = [tokenizer.image if prompt.number is None else prompt.number for prompt in prompts for _ in prompt.runs]
    ids[marks] = own

    def turn(first: int, end: int) -> EncodedTurn:
        images = int(((images_at >= first) & (images_at < end)).sum())
        some = slice(first, end)
        tokens, learned = np.repeat(ids[some], repeats[some]), np.repeat(mask[some], repeats[some])
        return EncodedTurn(tokens, learned, images, divisible=divisible and not images)

    opening, *others = (turn(*span) for span in pairwise([0, *bounds, len(ids)]))
    return EncodedConversation(opening, tuple(turn for turn in others if len(turn)))
