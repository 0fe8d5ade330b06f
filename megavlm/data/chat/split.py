"""Split conversations that are longer than a sequence: between exchanges only, and never away from their images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megavlm.data.chat.encoded import EncodedConversation, EncodedTurn
from megavlm.inputs.bad_sample import BadSample, Reason


@dataclass(frozen=True, eq=False)
class Piece:
    """L tokens for one sequence, and the numbers of the conversation's images in it."""

    tokens: NDArray[np.int64]  # [L]
    trained: NDArray[np.bool_]  # [L]
    images: range

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class Split:
    """The pieces of a conversation (at least one) and the number of its turns that are in none of them."""

    pieces: tuple[Piece, ...]
    dropped: int


def split(encoded: EncodedConversation, seq_length: int) -> Split:
    """Return pieces of at most `seq_length` tokens, each with the conversation's opening.

    The first piece is the longest beginning that fits. The rest makes further pieces if no image comes before it;
    else it is dropped, because it may be about an image that it would not see. An exchange that is longer than a piece
    is dropped, too. Divisible text is split where a piece is full. A piece does not end with turns without a loss.

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
        elif seen or (turn.images and not group):  # the rest may be about an image that it would not see
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
