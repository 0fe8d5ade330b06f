"""Conversations that are too long for a sequence: cut between exchanges, never through one, nor off its images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megavlm.data.chat.encoded import EncodedConversation, EncodedTurn
from megavlm.data.types import BadSample, Reason


@dataclass(frozen=True, eq=False)
class Piece:
    """L tokens for one sequence, and which of the conversation's images lie in it."""

    tokens: NDArray[np.int64]  # [L]
    trained: NDArray[np.bool_]  # [L]
    images: range

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class Split:
    """What became of a conversation: its pieces, at least one, and how many of its turns are in none of them."""

    pieces: tuple[Piece, ...]
    dropped: int


def split(encoded: EncodedConversation, seq_length: int) -> Split:
    """Pieces of at most `seq_length` tokens, each with the conversation's opening.

    The first piece is the longest beginning that fits. What follows makes further pieces where no image lies before
    them: a question may be about it. Else it is dropped, as is an exchange that fits no piece. Text that is divisible
    is cut where a piece is full. Turns at the end of a piece of which nothing is trained are left out.

    Raises BadSample where nothing is left to train on.
    """
    opening = encoded.opening
    dropped = 0
    seen = opening.images  # images so far
    groups: list[tuple[int, list[EncodedTurn]]] = [(0, [])]  # the number of images before, turns
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
        elif seen or (turn.images and not group):  # what follows may be about an image that it would be without
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
            raise BadSample(Reason.TOO_LONG, f"{len(encoded)} tokens, and no turn of them fits {seq_length}")
        raise BadSample(Reason.EMPTY, "nothing in it is trained")
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
