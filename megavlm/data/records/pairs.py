"""Convert a record of pairs to a `Conversation`: a query, documents that answer it, and documents that do not.

    {"query": TEXT, "positives": [TEXT, …], "negatives": [TEXT, …], "id": ID}

A TEXT is a text, a list of parts as messages have them, or an object of `text` and `image` or `images` (`video`,
`videos`), of which either may be missing. An `<image>` in its text stands for the next of its images; without any, they
come first. `id` says what the positives are, or `ids` what each document is, positives first: documents of one id are
the same. Without ids, documents of equal content are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megavlm.config.messages import shown
from megavlm.data.members import identity_of
from megavlm.data.records.pictures import FindFile
from megavlm.data.records.turns import text_turn
from megavlm.data.records.videos import FindVideo, no_videos
from megavlm.data.types import Conversation, ImageRef, Role, Turn, Visual
from megavlm.inputs.bad_sample import BadSample, Reason

OF_PAIRS = ("positive", "positives", "negative", "negatives", "id", "ids")  # fields beside the query
_FIELDS: dict[str, Role] = {
    "positive": "positive",
    "positives": "positive",
    "negative": "negative",
    "negatives": "negative",
}


def pairs_of(record: Mapping[str, Any], find: FindFile, find_video: FindVideo = no_videos) -> Conversation:
    """Return the texts of a record of pairs, which has a query. Raises BadSample."""
    turns = [_turn("query", record["query"], find, find_video)]
    for field, role in _FIELDS.items():
        for each in _listed(record.get(field), field):
            turns.append(_turn(role, each, find, find_video))
    positives = sum(turn.role == "positive" for turn in turns)
    if not positives:
        raise BadSample(Reason.EMPTY, "it has no positives: a query needs a document that answers it")
    return Conversation(tuple(turns), identities=tuple(_identities(record, turns, positives)))


def _listed(value: Any, field: str) -> list[Any]:
    """Return the texts of a field; one that is not a list is alone. A list of parts is no text of `positives`."""
    if value is None or value == "":
        return []
    return value if isinstance(value, list) and field.endswith("s") else [value]


def _turn(role: Role, content: Any, find: FindFile, find_video: FindVideo) -> Turn:
    fields = content if isinstance(content, Mapping) and "type" not in content else {"text": content}
    turn = text_turn(fields, find, find_video)
    if not any(not isinstance(part, str) or part.strip() for part in turn.parts):
        raise BadSample(Reason.EMPTY, f"its {role} has neither a text nor an image")
    return replace(turn, role=role)


def _identities(record: Mapping[str, Any], turns: list[Turn], positives: int) -> Iterator[int]:
    """Yield what each text is: by an id where the record gives one, else by its content."""
    documents, ids = len(turns) - 1, record.get("ids")
    if ids is None:
        ids = [record.get("id")] * positives + [None] * (documents - positives)
    if not isinstance(ids, list) or len(ids) != documents:
        raise BadSample(Reason.NOT_A_RECORD, f"its ids are {shown(ids)}, not a list of {documents}, one per document")
    for turn, given in zip(turns, [None, *ids], strict=True):
        if given is None:
            yield identity_of("content", *(_content(part) for part in turn.parts))
        elif isinstance(given, str | int) and not isinstance(given, bool):
            yield identity_of("id", str(given))
        else:
            raise BadSample(Reason.NOT_A_RECORD, f"its id {shown(given)} is neither a text nor a number")


def _content(part: str | Visual) -> str | bytes:
    if isinstance(part, str):
        return part
    source = part.source
    if isinstance(source, tuple):
        return "\0".join(str(_content(frame)) for frame in source)
    return source if isinstance(part, ImageRef) and isinstance(source, bytes) else str(source)
