"""Define the kinds of records that are read: the fields that each needs, and how they become a conversation.

What detects a kind, which columns of a table are read, what a message says of other records, and what counts for
`--validation-split` all follow from the table `SHAPES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from megavlm.config.messages import shown
from megavlm.data.records.pairs import OF_PAIRS, pairs_of
from megavlm.data.records.pictures import FindFile
from megavlm.data.records.turns import (
    VISUALS,
    Reader,
    Turns,
    conversation,
    from_cell,
    objects,
    parts_of,
    says_something,
    system_turn,
    turns_in,
    unzipped,
)
from megavlm.data.records.videos import FindVideo, no_videos
from megavlm.data.types import Conversation
from megavlm.inputs.bad_sample import BadSample, Reason

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """A kind of record.

    Of each group in `needs` a record has one field, the first that is not null; it may also have those of `also`.
    `read` returns the turns, given the fields that were found; None: the texts are not turns (`pairs.py`).
    """

    kind: str
    needs: tuple[tuple[str, ...], ...]
    also: tuple[str, ...]
    read: Callable[[Record, tuple[str, ...], Reader], Turns] | None

    def found(self, record: Record) -> tuple[str, ...] | None:
        """Return the field of each group that a record has, or None if it lacks one."""
        fields = [next((name for name in group if record.get(name) is not None), None) for group in self.needs]
        return None if None in fields else tuple(name for name in fields if name is not None)

    def missing(self, names: Collection[str]) -> list[tuple[str, ...]]:
        """Return the groups of which a record with fields of these names has none."""
        return [group for group in self.needs if not any(name in names for name in group)]

    def share(self, names: Collection[str]) -> float:
        """Return how much of what it needs a record with fields of these names has."""
        return 1 - len(self.missing(names)) / len(self.needs)

    @property
    def fields(self) -> tuple[str, ...]:
        """Return all fields that are read, without those of images and videos."""
        return (*(name for group in self.needs for name in group), *self.also)

    @property
    def words(self) -> str:
        """Return the needed fields as a message names them: `question + answer or answers`."""
        return " + ".join(" or ".join(group) for group in self.needs)


def _turns(record: Record, fields: tuple[str, ...], reader: Reader) -> Turns:
    return [*system_turn(record, reader), *turns_in(record[fields[0]], reader)]


def _text(record: Record, fields: tuple[str, ...], reader: Reader) -> Turns:
    return [("text", parts_of(record[fields[0]], reader))]


def _exchange(record: Record, fields: tuple[str, ...], reader: Reader) -> Turns:
    """Return a question, which `input` completes, and its answer, after the system prompt and the history."""
    turns = system_turn(record, reader)
    for pair in objects(record.get("history") or [], "history"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadSample(Reason.NOT_A_RECORD, f"its history holds {shown(pair)}, not pairs of question and answer")
        turns += [("user", parts_of(pair[0], reader)), ("assistant", parts_of(pair[1], reader))]
    question, answer = (parts_of(record[name], reader) for name in fields)
    if more := record.get("input"):
        question += ["\n", *parts_of(more, reader)]
    return [*turns, ("user", question), ("assistant", answer)]


def _question(record: Record, fields: tuple[str, ...], reader: Reader) -> Turns:
    """Return a question and the one of its reference answers that is trained."""
    if named := [name for name in ("choices", "options") if record.get(name)]:
        raise BadSample(Reason.UNSUPPORTED, f"its `{named[0]}` are not read: write them into the question")
    _, answer = fields
    return _exchange({**record, answer: _trained(record[answer], answer)}, fields, reader)


def _trained(value: Any, field: str) -> str:
    """Return the answer that is trained: of several, the commonest, and of equally common ones the first."""
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


_HISTORY = ("input", "system", "history")
# In the order in which they are tried: the more a kind needs, the earlier, and plain text, which others have beside
# their fields, last.
SHAPES = {
    shape.kind: shape
    for shape in (
        Shape("llava", (("conversations",),), ("system",), _turns),
        Shape("messages", (("messages",),), ("system",), _turns),
        Shape("pairs", (("query",), ("positives", "positive")), OF_PAIRS, None),
        Shape("query", (("query", "prompt"), ("response", "completion")), _HISTORY, _exchange),
        Shape("alpaca", (("instruction",), ("output",)), _HISTORY, _exchange),
        Shape("vqa", (("question",), ("answer", "answers")), ("system", "choices", "options"), _question),
        Shape("cauldron", (("texts", "conversation"),), ("system",), _turns),
        Shape("text", (("text", "caption"),), (), _text),
    )
}
# Marks in texts for what other fields have (of ms-swift, LLaMA-Factory), which are not filled in.
_UNFILLED = {"<audio>": ("audios", "audio"), "<bbox>": ("objects",), "<ref-object>": ("objects",)}
_NO_CONTENT = ("id", "ids", "fps")  # copies of a record have names of their own


def shape_of(record: Any, kinds: Iterable[str] = SHAPES) -> str | None:
    """Return the first of `kinds` whose fields a record has, or None."""
    if not isinstance(record, Mapping):
        return None
    return next((kind for kind in kinds if SHAPES[kind].found(record) is not None), None)


def columns_of(kinds: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the columns of a table that are read if its records are of one of `kinds`; none if no kind fits."""
    fit = [SHAPES[kind] for kind in kinds if not SHAPES[kind].missing(names)]
    wanted = {name for shape in fit for name in (*shape.fields, *VISUALS)}
    return [name for name in names if name in wanted]


def content_of(record: Record) -> dict[str, Any]:
    """Return what a record says: the fields that are read of it, but for those that do not change what is trained."""
    kind = shape_of(record)
    fields = () if kind is None else (*(SHAPES[kind].found(record) or ()), *SHAPES[kind].also, *VISUALS)
    return {name: record[name] for name in fields if name not in _NO_CONTENT and record.get(name) is not None}


def record_of(record: Any, kind: str, find: FindFile, find_video: FindVideo = no_videos) -> Conversation:
    """Return what is in a record of a kind; `find` returns an image by its name, `find_video` a video.

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
    if shape.read is None and record.get("query") is not None:
        return pairs_of(record, find, find_video)
    if fields is None or shape.read is None:
        group = next(group for group in shape.needs if all(record.get(name) is None for name in group))
        lacks = " or ".join(f"`{name}`" for name in group)
        raise BadSample(Reason.NOT_A_RECORD, f"it has no field {lacks} but {shown(sorted(map(str, record)))}")
    found = conversation(record, partial(shape.read, record, fields), find, find_video)
    for mark, names in _UNFILLED.items():
        holds = next((name for name in names if record.get(name)), None)
        texts = (part for turn in found.turns for part in turn.parts if isinstance(part, str))
        if holds is not None and any(mark in text for text in texts):
            what = f"its texts have {mark} for what `{holds}` holds, which is not read"
            raise BadSample(Reason.UNSUPPORTED, f"{what}: write that into the texts, or leave the record out")
    if not any(says_something(turn) for turn in found.turns if turn.role in ("assistant", "text")):
        why = "it has no text" if shape.kind == "text" else "the assistant says nothing"
        chosen = ": write the answer that is `chosen` into its turns" if record.get("chosen") else ""
        raise BadSample(Reason.EMPTY, why + chosen)
    return found
