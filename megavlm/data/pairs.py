"""Turn records of pairs into tokens: each text by itself, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megavlm.config.schema import ObjectiveConfig
from megavlm.data.chat import ChatFormat, Piece
from megavlm.data.members import NEGATIVE, POSITIVE, QUERY, Member
from megavlm.data.types import Conversation, Turn
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Prompt

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
        text = text_tokens(turn, own, chat, options)
        if len(text) > room:
            if turn.role == "negative":
                break
            raise BadSample(
                Reason.TOO_LONG, f"its query and positives do not fit --seq-length {seq_length} together: raise it"
            )
        room -= len(text)
        image += len(own)
        tokens.append(text)
        members.append(Member(_ROLES[turn.role], identity, len(text), len(own)))
    joined = np.concatenate(tokens)
    piece = Piece(joined, np.zeros(len(joined), dtype=np.bool_), range(image))
    return EncodedPairs(piece, tuple(members), len(record.turns) - len(members))


def text_tokens(text: Turn, prompts: Sequence[Prompt], chat: ChatFormat, options: ObjectiveConfig) -> NDArray[np.int64]:
    """Return the tokens [L] of a query or a document behind its instruction, the end token included.

    Raises BadSample for a text that has none.
    """
    prefix = options.query_prefix if text.role == "query" else options.document_prefix
    parts = (prefix, *text.parts) if prefix else text.parts
    return chat.encode(Conversation((Turn("text", parts),)), prompts).tokens
