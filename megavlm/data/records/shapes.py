"""Define the kinds of records: the fields that each kind needs, and its conversion to a conversation.

The table `SHAPES` determines how a kind is detected, which columns of a table are read, the messages about other
records, and which fields count for `--validation-split`.

A record of pairs is a query, documents that answer it, and documents that do not:

    {"query": TEXT, "positives": [TEXT, …], "negatives": [TEXT, …], "id": ID}

A TEXT is a text, a list of message parts, or an object of `text` and `image` or `images` (`video`, `videos`), where
either may be missing. An `<image>` in a text stands for the next of the object's images; without any `<image>`, the
images come first. `id` identifies the positives, or `ids` each document, positives first. Documents with equal ids, or
without ids those of equal content, are the same document.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megavlm.config.messages import shown
from megavlm.data.records.media import FindFile, FindVideo
from megavlm.data.records.turns import (
    VISUALS,
    Parts,
    Reader,
    Turns,
    conversation,
    from_cell,
    is_turn,
    objects,
    parts_of,
    says_something,
    system_turn,
    text_turn,
    turns_in,
    unzipped,
)
from megavlm.data.types import Conversation, ImageRef, Role, Turn, Visual, identity_of
from megavlm.inputs.bad_sample import BadSample, Reason

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """A kind of record, defined by its fields.

    A record has at least one field of each group in `needs`; the first that is not null is read. It may also have the
    fields `also`. `read` returns the turns, given the fields that were found; None for pairs and preferences, which are
    converted separately.
    """

    kind: str
    needs: tuple[tuple[str, ...], ...]
    also: tuple[str, ...]
    read: Callable[[Record, tuple[str, ...], Reader], Turns] | None

    def found(self, record: Record) -> tuple[str, ...] | None:
        """Return the field that a record has of each group in `needs`; None if it lacks a group."""
        fields = [next((name for name in group if record.get(name) is not None), None) for group in self.needs]
        return None if None in fields else tuple(name for name in fields if name is not None)

    def missing(self, names: Collection[str]) -> list[tuple[str, ...]]:
        """Return the groups in `needs` that have none of the field `names`."""
        return [group for group in self.needs if not any(name in names for name in group)]

    def share(self, names: Collection[str]) -> float:
        """Return the fraction, 0 to 1, of the needed groups that the field `names` cover."""
        return 1 - len(self.missing(names)) / len(self.needs)

    @property
    def fields(self) -> tuple[str, ...]:
        """Return all fields that are read, except those of images and videos."""
        return (*(name for group in self.needs for name in group), *self.also)

    @property
    def words(self) -> str:
        """Return the needed fields as text for messages, such as `question + answer or answers`."""
        return " + ".join(" or ".join(group) for group in self.needs)


def _turns(record: Record, fields: tuple[str, ...], reader: Reader) -> Turns:
    turns = turns_in(record[fields[0]], reader)
    speakers = [role for role, _ in turns if role != "system"]
    if speakers[:1] == ["assistant"] and speakers[-1:] == ["user"]:
        raise BadSample(Reason.ROLE, "the assistant speaks first and the user last: exchange the roles")
    return [*system_turn(record, reader), *turns]


def _text(record: Record, fields: tuple[str, ...], reader: Reader) -> Turns:
    return [("text", parts_of(record[fields[0]], reader))]


def _exchange(record: Record, fields: tuple[str, ...], reader: Reader) -> Turns:
    """Return the system prompt, the history, the question (with `input` appended) and its answer as turns.

    Question and answer may be lists of turns (TRL's `prompt` and `completion`).
    """
    question, answer = fields
    return [*_asked(record, record[question], reader), *_said(record[answer], reader)]


def _asked(record: Record, prompt: Any, reader: Reader) -> Turns:
    """Return the turns before an answer: those in `prompt`, or the system prompt, the history and `prompt` itself."""
    turns = system_turn(record, reader)
    if asked := _turns_in_cell(prompt):
        return [*turns, *turns_in(asked, reader)]
    for pair in objects(record.get("history") or [], "history"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadSample(Reason.NOT_A_RECORD, f"its history holds {shown(pair)}, not pairs of question and answer")
        turns += [("user", parts_of(pair[0], reader)), ("assistant", parts_of(pair[1], reader))]
    question: Parts = []
    for text in (prompt, record.get("input") or ""):
        question += [*(["\n"] if question and text else []), *(parts_of(text, reader) if text != "" else [])]
    return [*turns, ("user", question)]


def _question(record: Record, fields: tuple[str, ...], reader: Reader) -> Turns:
    """Return the turns of a question and its most common reference answer. Raises BadSample for multiple choice."""
    if named := [name for name in ("choices", "options") if record.get(name)]:
        raise BadSample(Reason.UNSUPPORTED, f"its `{named[0]}` are not read: write them into the question")
    _, answer = fields
    return _exchange({**record, answer: _trained(record[answer], answer)}, fields, reader)


def _trained(value: Any, field: str) -> str:
    """Return the answer to train on: the most common reference answer, or the first of equally common ones."""
    several = unzipped(from_cell(value) if field == "answers" else value)
    found = []
    for each in several if isinstance(several, list) else [several]:
        text = each.get("answer", each.get("text")) if isinstance(each, Mapping) else each
        if isinstance(text, bool) or not isinstance(text, str | int | float) or text != text:
            raise BadSample(Reason.NOT_A_RECORD, f"its `{field}` is {shown(value)}, neither a text nor a list of texts")
        found.append(str(text))
    if not found:
        raise BadSample(Reason.EMPTY, f"its `{field}` is an empty list")
    return Counter(found).most_common(1)[0][0]


_DOCUMENTS: dict[str, Role] = {  # the fields of a record of pairs other than the query
    "positive": "positive",
    "positives": "positive",
    "negative": "negative",
    "negatives": "negative",
}
_HISTORY = ("input", "system", "history")
_TURNS = ({"role", "content"}, {"from", "value"})
# Fields of a preference: the rejected answer, or the rating of a single answer; the rated answer; the preceding turns.
REJECTED = ("rejected", "rejected_response", "rejected_messages")
_RATINGS, _RATED = ("label", "kto_tag"), ("completion", "response", "output")
_GOOD = {"true": True, "1": True, "false": False, "0": False}
_PROMPTS = ("messages", "conversations", "prompt", "question", "query", "instruction")
# In the order in which kinds are tried: kinds that need more fields come earlier, and plain text, a field that records
# of other kinds may also have, comes after them.
SHAPES = {
    shape.kind: shape
    for shape in (
        Shape("llava", (("conversations",),), ("system",), _turns),
        Shape("messages", (("messages",),), ("system",), _turns),
        Shape("pairs", (("query",), ("positives", "positive")), (*_DOCUMENTS, "id", "ids"), None),
        Shape("query", (("query", "prompt"), ("response", "completion")), _HISTORY, _exchange),
        Shape("alpaca", (("instruction",), ("output",)), _HISTORY, _exchange),
        Shape("vqa", (("question",), ("answer", "answers")), ("system", "choices", "options"), _question),
        Shape("cauldron", (("texts", "conversation"),), ("system",), _turns),
        Shape("text", (("text", "caption"),), (), _text),
        Shape(
            "preferences",
            ((*REJECTED, *_RATINGS), ("chosen", *_RATED, "messages", "conversations")),
            (*_PROMPTS, *_HISTORY, "margin"),
            None,
        ),
    )
}
UNASKED = tuple(kind for kind in SHAPES if kind != "preferences")  # preferences are read on request only
# Tags in texts that stand for values of another field (ms-swift); they are not supported.
_UNFILLED, _FILLING = ("<bbox>", "<ref-object>"), "objects"
_NO_CONTENT = ("id", "ids", "fps", "margin")  # not hashed: copies of a record may have different ids


def shape_of(record: Any, kinds: Iterable[str] = SHAPES) -> str | None:
    """Return the first of `kinds` whose fields a record has, or None."""
    if not isinstance(record, Mapping):
        return None
    return next((kind for kind in kinds if SHAPES[kind].found(record) is not None), None)


def columns_of(kinds: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the columns to read of a table with columns `names`, for those of `kinds` that fit; [] if none fits."""
    fit = [SHAPES[kind] for kind in kinds if not SHAPES[kind].missing(names)]
    wanted = {name for shape in fit for name in (*shape.fields, *VISUALS, _FILLING)}
    return [name for name in names if name in wanted]


def content_of(record: Record) -> dict[str, Any]:
    """Return the fields of a record that determine its content for training: those read, except ids and `fps`."""
    kind = shape_of(record)
    fields = () if kind is None else (*(SHAPES[kind].found(record) or ()), *SHAPES[kind].also, *VISUALS)
    return {name: record[name] for name in fields if name not in _NO_CONTENT and record.get(name) is not None}


def record_of(record: Any, kind: str, find: FindFile, find_video: FindVideo) -> Conversation:
    """Convert a record of a kind to a conversation; `find` looks up an image by its name, `find_video` a video.

    Raises no error but BadSample.
    """
    try:
        return _record_of(record, SHAPES[kind], find, find_video)
    except RecursionError as error:
        raise BadSample(Reason.NOT_A_RECORD, "it is nested too deeply") from error


def _record_of(record: Any, shape: Shape, find: FindFile, find_video: FindVideo) -> Conversation:
    if not isinstance(record, Mapping):
        raise BadSample(Reason.NOT_A_RECORD, f"a record is an object with fields, not {shown(record)}")
    fields = shape.found(record)
    if shape.kind == "preferences" and fields is not None:
        return _preference_of(record, fields, find, find_video)
    if shape.read is None and record.get("query") is not None:
        return _pairs_of(record, find, find_video)
    if fields is None or shape.read is None:
        group = next(group for group in shape.needs if all(record.get(name) is None for name in group))
        lacks = " or ".join(f"`{name}`" for name in group)
        raise BadSample(Reason.NOT_A_RECORD, f"it has no field {lacks} but {shown(sorted(map(str, record)))}")
    found = conversation(record, partial(shape.read, record, fields), find, find_video)
    texts = [part for turn in found.turns for part in turn.parts if isinstance(part, str)]
    for mark in _UNFILLED if record.get(_FILLING) else ():
        if any(mark in text for text in texts):
            what = f"its texts have {mark} for what `{_FILLING}` holds, which is not read"
            raise BadSample(Reason.UNSUPPORTED, f"{what}: write that into the texts, or leave the record out")
    if not any(says_something(turn) for turn in found.turns if turn.role in ("assistant", "text")):
        why = "it has no text" if shape.kind == "text" else "the assistant says nothing"
        raise BadSample(Reason.EMPTY, why)
    return found


def _preference_of(record: Record, fields: tuple[str, ...], find: FindFile, find_video: FindVideo) -> Conversation:
    """Return the conversations with the chosen and the rejected answer, or the one with a rated answer, as one.

    Raises BadSample.
    """
    rejected, answer = fields
    chosen: tuple[str, ...] = ("chosen", rejected)
    good = None
    if rejected in _RATINGS:
        good = _GOOD.get(str(record[rejected]).lower())
        if good is None:
            raise BadSample(
                Reason.NOT_A_RECORD, f"its `{rejected}` is {shown(record[rejected])}, neither true nor false"
            )
        chosen = (answer if answer in _RATED else "chosen",)
    found = [conversation(record, partial(_answered, record, field), find, find_video) for field in chosen]
    for each in found:
        if each.turns[-1].role != "assistant" or not says_something(each.turns[-1]):
            raise BadSample(Reason.EMPTY, "a conversation of it does not end with an answer")
    said = [[piece for turn in each.turns for piece in (turn.role, *map(_content, turn.parts))] for each in found]
    counts = [len(each.turns) for each in found]
    return Conversation(
        tuple(turn for each in found for turn in each.turns),
        identities=tuple(identity_of("answer", *pieces) for pieces in said),
        answers=tuple(counts if good is None else [*counts, 0] if good else [0, *counts]),
        margin=_margin(record.get("margin")),
    )


def _margin(value: Any) -> float:
    """Return the margin of a preference, which a table may hold as text; 0 without one. Raises BadSample."""
    try:
        margin = float(value or 0.0)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise BadSample(Reason.NOT_A_RECORD, f"its `margin` is {shown(value)}, which is no number")
    return margin


def _answered(record: Record, field: str, reader: Reader) -> Turns:
    """Return the turns of the conversation that ends with the answer in `field`; the field may hold the whole.

    In a record without the field `chosen`, the prompt turns (ms-swift's `messages`) end with the chosen answer.
    """
    turns = _said(record[field], reader) if record.get(field) is not None else []
    if turns and turns[0][0] != "assistant":
        return turns if turns[0][0] == "system" else [*system_turn(record, reader), *turns]
    name = next((name for name in _PROMPTS if record.get(name)), None)
    if name is None:
        raise BadSample(Reason.NOT_A_RECORD, f"it has no prompt: {', '.join(_PROMPTS)}, or turns in its answers")
    before = _asked(record, record[name], reader)
    if turns and record.get("chosen") is None and before[-1][0] == "assistant":
        before.pop()
    return [*before, *turns]


def _said(answer: Any, reader: Reader) -> Turns:
    """Return the turns in an answer, which may be text or parts."""
    turns = _turns_in_cell(answer)
    return turns_in(turns, reader) if turns else [("assistant", parts_of(answer, reader))]


def _turns_in_cell(value: Any) -> list[Any]:
    """Return the turns in a value: a turn, a list of turns, or either as a table stores it; [] if it is anything else,
    as an answer that is JSON. In a text, all objects have all of a turn's fields.
    """
    found = unzipped(from_cell(value))
    turns = found if isinstance(found, list) else [found]
    if isinstance(value, str):
        whole = all(isinstance(each, Mapping) and any(fields <= each.keys() for fields in _TURNS) for each in turns)
        return turns if whole else []
    return turns if any(map(is_turn, turns)) else []


def _pairs_of(record: Mapping[str, Any], find: FindFile, find_video: FindVideo) -> Conversation:
    """Convert a record of pairs to a conversation of its query, positives and negatives. Raises BadSample."""
    turns = [_turn("query", record["query"], find, find_video)]
    for field, role in _DOCUMENTS.items():
        for each in _listed(record.get(field), field):
            turns.append(_turn(role, each, find, find_video))
    positives = sum(turn.role == "positive" for turn in turns)
    if not positives:
        raise BadSample(Reason.EMPTY, "it has no positives: a query needs a document that answers it")
    return Conversation(tuple(turns), identities=tuple(_identities(record, turns, positives)))


def _listed(value: Any, field: str) -> list[Any]:
    """Return the texts in a document field as a list. In `positive` and `negative`, a list is one text of parts."""
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
    """Yield the identity number of each text, from its id if the record has one, else from its content."""
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
