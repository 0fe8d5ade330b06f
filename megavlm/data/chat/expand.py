"""Rendered text with places for images → tokens, a mask of what is trained, and the turns they fall into."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from megavlm.data.bad import BadSample, Reason
from megavlm.data.chat.encoded import EncodedConversation, EncodedTurn
from megavlm.data.processors.layout import Prompt
from megavlm.data.text_tokenizer import TextTokenizer


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
    """Tokens of a rendered conversation, in turns that end at `cuts`, the first of which is the opening.

    `prompts` replace the placeholders, in order. A run of image tokens is one of them while the text is tokenised: what
    stands beside the run is the same. The characters of the spans `trained` are trained where they are no image. With
    `divisible`, turns are text that may be cut anywhere, and images between.

    Raises BadSample where the text has other places for images than there are prompts.
    """
    stretches = rendered.split(placeholder)
    if len(stretches) != len(prompts) + 1:
        raise BadSample(Reason.IMAGE_COUNT, f"{len(prompts)} images and {len(stretches) - 1} places for one")
    written = [stretches[0]]
    pictures: list[tuple[int, int]] = []  # characters of `written` that stand for an image
    shifts: list[tuple[int, int]] = [(0, 0)]  # from this character of `rendered` on, so much to the right
    at, source = len(stretches[0]), len(stretches[0])
    for prompt, stretch in zip(prompts, stretches[1:], strict=True):
        image = tokenizer.image_text.join(prompt.texts)
        written += image, stretch
        pictures.append((at, at + len(image)))
        source += len(placeholder)
        at += len(image)
        shifts.append((source, at - source))
        source, at = source + len(stretch), at + len(stretch)
    text = "".join(written)
    tokens = tokenizer.encode(text)
    starts, ends = tokens.starts, np.maximum(tokens.ends, tokens.starts + 1)

    def moved(place: int) -> int:
        return place + shifts[bisect_right(shifts, place, key=itemgetter(0)) - 1][1]

    def covered(spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
        mask = np.zeros(len(tokens), dtype=np.bool_)
        for start, end in spans:
            mask |= (ends > start) & (starts < end)
        return mask

    ids, mask = tokens.ids, covered([(moved(start), moved(end)) for start, end in trained]) & ~covered(pictures)
    begin = tokenizer.begin
    if begin is not None and not text.startswith(tokenizer.specials.get("bos_token", "\0")):
        ids, mask = np.concatenate(([begin], ids)), np.concatenate(([False], mask))
        starts, ends = np.concatenate(([0], starts)), np.concatenate(([0], ends))
    if len(mask):
        mask[0] &= ids[0] != begin
    runs = [run for prompt in prompts for run in prompt.runs]
    marks = ids == tokenizer.image
    if marks.sum() != len(runs):
        raise BadSample(Reason.IMAGE_COUNT, f"{marks.sum()} image tokens are written where {len(runs)} belong")
    last = np.maximum.accumulate(np.maximum(ends - 1, starts)) if len(ids) else ends
    bounds = [int(np.searchsorted(last, moved(cut))) for cut in cuts]
    if begin is not None and len(ids) and ids[0] == begin:
        bounds[0] = max(bounds[0], 1)
    images_at = np.searchsorted(last, [end - 1 for _, end in pictures])
    if divisible:  # an image and the text after it: turns of their own
        firsts = np.searchsorted(starts, [start for start, _ in pictures])
        bounds = sorted({*bounds, *(int(first) for first in firsts), *(int(end) + 1 for end in images_at)})
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[marks] = runs
    turns = []
    for first, end in zip([0, *bounds], [*bounds, len(ids)], strict=True):
        images = int(((images_at >= first) & (images_at < end)).sum())
        some = slice(first, end)
        turns.append(
            EncodedTurn(
                np.repeat(ids[some], repeats[some]),
                np.repeat(mask[some], repeats[some]),
                images,
                divisible=divisible and not images,
            )
        )
    opening, *others = turns
    return EncodedConversation(opening, tuple(turn for turn in others if len(turn)))
