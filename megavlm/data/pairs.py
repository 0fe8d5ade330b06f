"""Turn records of pairs into tokens: each text by itself, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megavlm.config.schema import ObjectiveConfig
from megavlm.data.chat import ChatFormat, Piece
from megavlm.data.members import NEGATIVE, POSITIVE, QUERY, Member
from megavlm.data.processors.layout import Prompt
from megavlm.data.types import BadSample, Conversation, Reason, Turn

_ROLES = {"query": QUERY, "positive": POSITIVE, "negative": NEGATIVE}


@dataclass(frozen=True, eq=False)
class EncodedPairs:
    """The texts of a record that fit into a sequence, as one piece; `dropped` negatives do not."""

    piece: Piece
    members: tuple[Member, ...]
    dropped: int


def encode_pairs(
    record: Conversation,
    prompts: Sequence[Prompt],
    chat: ChatFormat,
    options: ObjectiveConfig,
    *,
    seq_length: int,
) -> EncodedPairs:
    """Return the tokens of a record's texts, each with its instruction before it and the end token behind it.

    `prompts` are those of all images of the record, in order. Raises BadSample if the query and the positives are
    longer than a sequence together.
    """
    tokens, members, image = [], [], 0
    room = seq_length
    for turn, identity in zip(record.turns, record.identities, strict=True):
        own = prompts[image : image + len(turn.images)]
        prefix = options.query_prefix if turn.role == "query" else options.document_prefix
        text = chat.encode(Conversation((Turn("text", (prefix, *turn.parts) if prefix else turn.parts),)), own)
        if len(text) > room:
            if turn.role == "negative":
                break
            raise BadSample(
                Reason.TOO_LONG, f"its query and positives do not fit --seq-length {seq_length} together: raise it"
            )
        room -= len(text)
        image += len(own)
        tokens.append(text.tokens)
        members.append(Member(_ROLES[turn.role], identity, len(text), len(own)))
    joined = np.concatenate(tokens)
    piece = Piece(joined, np.zeros(len(joined), dtype=np.bool_), range(image))
    return EncodedPairs(piece, tuple(members), len(record.turns) - len(members))
