"""Tokenize rendered conversations with image placeholders into turns, and split conversations that are too long.

Conversations are split between exchanges only, and never apart from their images.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from megavlm.data.tokenizers import TextTokenizer
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Prompt


@dataclass(frozen=True, eq=False)
class EncodedTurn:
    """L tokens that stay in one sequence unless `divisible`: a question with its answer, or a piece of plain text."""

    tokens: NDArray[np.int64]  # [L], each image expanded to one image token per feature
    trained: NDArray[np.bool_]  # [L]; the tokens that the model must learn to predict
    images: int  # number of images in these tokens
    divisible: bool = False  # plain text, which may be split between any two tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, end: int) -> EncodedTurn:
        """Return tokens `start` to `end` of divisible text."""
        assert self.divisible, "only plain text is split inside a turn"
        return EncodedTurn(self.tokens[start:end], self.trained[start:end], 0, divisible=True)


@dataclass(frozen=True, eq=False)
class EncodedConversation:
    """A tokenized conversation: `opening` (begin-of-text token, system turn), which begins each piece, and `turns`."""

    opening: EncodedTurn
    turns: tuple[EncodedTurn, ...]

    @property
    def tokens(self) -> NDArray[np.int64]:
        return np.concatenate([turn.tokens for turn in self._all])

    @property
    def trained(self) -> NDArray[np.bool_]:
        return np.concatenate([turn.trained for turn in self._all])

    @property
    def images(self) -> int:
        return sum(turn.images for turn in self._all)

    def __len__(self) -> int:
        return sum(map(len, self._all))

    @property
    def _all(self) -> Iterable[EncodedTurn]:
        return (self.opening, *self.turns)


@dataclass(frozen=True)
class _Written:
    """A rendered conversation whose placeholders are replaced by the text of image prompts."""

    text: str
    pictures: list[tuple[int, int]]  # [start, end) characters of each image's prompt
    shifts: list[tuple[int, int]]  # (offset in the rendered text, how far the characters from there on have moved)

    def moved(self, place: int) -> int:
        """Map an offset in the rendered text to the offset of the same character in `text`."""
        return place + self.shifts[bisect_right(self.shifts, place, key=itemgetter(0)) - 1][1]


def _written(stretches: Sequence[str], prompts: Sequence[Prompt], placeholder: int, image_text: str) -> _Written:
    """Return the rendered text with placeholders replaced by the images' prompts.

    `stretches` are the texts between placeholders, which have `placeholder` characters each. Raises BadSample if there
    are not as many placeholders as prompts.
    """
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
    begins: bool = False,
    divisible: bool = False,
) -> EncodedConversation:
    """Tokenize a rendered conversation, and return its tokens by turn.

    A run of image tokens is one token while the text is tokenized, and is repeated afterwards. This does not change the
    other tokens, since the neighbours of the run are the same.

    Args:
        prompts: the images' prompts, which replace the placeholders in order.
        trained: [start, end) characters of the rendered text with a loss; image tokens never have a loss.
        cuts: offsets in the rendered text at which turns end; the first turn is the opening.
        begins: whether a template wrote the begin-of-sequence token, maybe after images; else text may start with it.
        divisible: whether the turns are plain text, which may be split anywhere except inside an image.

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
    begin, spelt = tokenizer.begin, tokenizer.specials.get("bos_token", "\0")
    if begin is not None and not (spelt in written.text if begins else written.text.startswith(spelt)):
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
    own = [tokenizer.image if number is None else number for prompt in prompts for number in prompt.numbers]
    ids[marks] = own

    def turn(first: int, end: int) -> EncodedTurn:
        images = int(((images_at >= first) & (images_at < end)).sum())
        some = slice(first, end)
        tokens, learned = np.repeat(ids[some], repeats[some]), np.repeat(mask[some], repeats[some])
        return EncodedTurn(tokens, learned, images, divisible=divisible and not images)

    opening, *others = (turn(*span) for span in pairwise([0, *bounds, len(ids)]))
    return EncodedConversation(opening, tuple(turn for turn in others if len(turn)))


@dataclass(frozen=True, eq=False)
class Piece:
    """L tokens of a conversation for one sequence, and the numbers of the conversation's images in them."""

    tokens: NDArray[np.int64]  # [L]
    trained: NDArray[np.bool_]  # [L]
    images: range

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class Split:
    """The pieces of a conversation (at least one) and the number of dropped turns."""

    pieces: tuple[Piece, ...]
    dropped: int


def split(encoded: EncodedConversation, seq_length: int) -> Split:
    """Split a conversation into pieces of at most `seq_length` tokens, each with the conversation's opening.

    The first piece is the longest prefix that fits. The rest makes further pieces if no image precedes it; else it is
    dropped, because it may refer to an image that its piece would lack. An exchange that is longer than a piece is
    dropped, too. Divisible text is split where a piece is full. Turns without a loss at the end of a piece are removed.

    Raises BadSample if no trained token is left.
    """
    opening = encoded.opening
    dropped = 0
    seen = opening.images  # number of images so far
    groups: list[tuple[int, list[EncodedTurn]]] = [(0, [])]  # (number of images before it, its turns)
    waiting = list(reversed(encoded.turns))
    while waiting:
        turn = waiting.pop()
        group = groups[-1][1]
        room = seq_length - len(opening) - sum(map(len, group))
        if len(turn) <= room:
            group.append(turn)
            seen += turn.images
        elif turn.divisible and room > 0:
            group.append(turn.part(0, room))
            waiting.append(turn.part(room, len(turn)))
        elif seen or (turn.images and not group):  # the rest may refer to an image that its piece would lack
            dropped += 1 + len(waiting)
            break
        elif group:
            groups.append((seen, []))
            waiting.append(turn)
        else:
            dropped += 1
    pieces = [_piece(opening, group, before) for before, group in groups]
    kept = tuple(piece for piece in pieces if piece.trained[1:].any())
    if not kept:
        if dropped:
            raise BadSample(
                Reason.TOO_LONG, f"it has {len(encoded)} tokens, and no trained turn fits --seq-length {seq_length}"
            )
        raise BadSample(Reason.EMPTY, "none of its tokens is trained")
    return Split(kept, dropped)


def _piece(opening: EncodedTurn, group: list[EncodedTurn], before: int) -> Piece:
    while group and not group[-1].trained.any():
        group = group[:-1]
    turns = [opening, *group]
    return Piece(
        np.concatenate([turn.tokens for turn in turns]),
        np.concatenate([turn.trained for turn in turns]),
        range(before, before + sum(turn.images for turn in turns)),
    )
