"""Read a pickle as data, with an interpreter for only the few opcodes that plain objects are written with.

Python's unpickler calls what a file tells it to call. This one looks names up in a table of exact objects, can neither
import nor take attributes, and leaves calling to its caller. It reads protocol 2, which `torch.save` writes, and
protocols 4 and 5, which torch and megatron-core write otherwise; the standard library's `pickletools` describes the
opcodes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Call = Callable[[Any, tuple[Any, ...]], Any]
Build = Callable[[Any, Any], None]

_PROTOCOLS = (2, 4, 5)
_LONGEST_NAME = 200  # bytes
_REPEATS = 8  # values and letters that a memo may repeat for each byte of a pickle, beyond the first _FREE
_FREE = 2**16
_MOST_COLLISIONS = 2**10  # keys whose hashes are equal: each is compared with all before it


class Refused(ValueError):
    """Is raised for a pickle that names an object, or uses an opcode, that is not known here."""


def load(
    data: bytes,
    *,
    objects: Mapping[tuple[str, str], Any],
    call: Call,
    keys: tuple[type, ...],
    build: Build | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return what `data` describes, in time and memory that are proportional to its length.

    So are they of whoever walks over the result, prints it or compares it: it is a tree, in which only flat values
    occur more than once, and not often.

    `objects`: (module, name) → what the pickle may name. `call` makes an object of one of these and arguments; `build`
    gives an object its state; `persistent` returns what lies outside of the pickle; None: no pickle may ask for that.
    `keys`: types of the keys of dicts, which must be quick to hash. Raises Refused for anything beyond that, and
    ValueError, IndexError, TypeError or another error where the bytes are damaged.
    """
    if data[:1] != b"\x80" or data[1] not in _PROTOCOLS:
        raise Refused("is a pickle of a protocol that is not read here")
    return _Interpreter(data, objects, call, keys, build, persistent).run()


def name_of(called: Any) -> str:
    """Return what a message says of what a pickle calls, which may be deep or long."""
    return str(getattr(called, "__name__", f"a {type(called).__name__}"))


def is_size(value: Any) -> bool:
    """Return whether a value of a pickle is a whole number that may be an offset or a length."""
    return type(value) is int and 0 <= value < 2**62


@dataclass(eq=False)
class _Interpreter:
    """The pickle machine: a stack of values, marks in it, and a memo of values that are used again."""

    data: bytes
    objects: Mapping[tuple[str, str], Any]
    make: Call
    keys: tuple[type, ...]
    set_state: Build | None
    outside: Callable[[Any], Any] | None
    at: int = 2  # the next byte to read; the first two tell the protocol
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    repeated: int = 0  # values and letters that the memo has repeated
    fixed: set[int] = field(default_factory=set)  # what the memo has repeated, by `id`; the memo keeps it alive
    hashes: dict[int, Any] = field(default_factory=dict)  # hash → the first key that has it; without texts
    collisions: int = 0

    def run(self) -> Any:
        """Return the value that is on top of the stack at the end."""
        while (opcode := self.data[self.at]) != _STOP:
            self.at += 1
            if opcode in _PUSHED:
                self.stack.append(_PUSHED[opcode](self))
            elif opcode in _DONE:
                _DONE[opcode](self)
            else:
                raise Refused(f"has the opcode {opcode:#04x}, which no tensor checkpoint needs")
        return self.stack.pop()

    # What the bytes after an opcode say

    def number(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            raise ValueError("it ends too early")
        self.at += count
        return found

    def text(self, layout: str) -> str:
        return str(self.take(self.number(layout)), "utf-8")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at, self.at + _LONGEST_NAME)
        return str(self.take(end + 1 - self.at)[:-1], "utf-8")

    # What is on the stack

    def since_mark(self) -> list[Any]:
        return self.last(len(self.stack) - self.marks.pop())

    def last(self, count: int) -> list[Any]:
        start = len(self.stack) - count
        if start < 0:
            raise ValueError("it takes more than there is")
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def put(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not dict or not all(type(key) in self.keys for key in items[::2]):
            raise Refused("has a dict whose keys are not known here")
        others = [key for key in items[::2] if type(key) is not str]  # hashes of texts cannot be chosen
        self.collisions += sum(self.hashes.setdefault(hash(key), key) != key for key in others)
        if self.collisions > _MOST_COLLISIONS:
            raise Refused("has keys that are chosen to have equal hashes")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise Refused("appends to what is no list")
        self.stack[-1].extend(items)

    # What the caller allows

    def named(self, module: Any, name: Any) -> Any:
        if type(name) is not str or type(module) is not str:
            raise Refused("names what is no text")
        if (module, name) not in self.objects:
            raise Refused(f"names {f'{module}.{name}'[:150]!r}, which no tensor checkpoint needs")
        return self.objects[module, name]

    def called(self) -> Any:
        what, arguments = self.last(2)
        if type(arguments) is not tuple:
            raise Refused("calls with what is no tuple")
        return self.make(what, arguments)

    def build(self) -> None:
        if self.set_state is None:
            raise Refused("gives an object a state, which no tensor checkpoint needs")
        state = self.stack.pop()
        if id(self.stack[-1]) in self.fixed:
            raise Refused("changes an object that it has used twice")
        self.set_state(self.stack[-1], state)

    def from_outside(self) -> Any:
        if self.outside is None:
            raise Refused("asks for what lies outside of it, which no tensor checkpoint needs")
        return self.outside(self.stack.pop())

    def memorize(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def again(self, place: int) -> Any:
        """Return a value of the memo. Raises Refused for one that holds others.

        A tuple of the tuple before, twice, and so on 45 times, is 140 bytes, and to whoever walks over it 2⁴⁵ values.
        """
        value = self.memo[place]
        held = value if type(value) is tuple else _attributes(value)
        if type(value) in (list, dict) or any(type(each) in (list, dict, tuple) for each in held):
            raise Refused("uses a value that holds others twice")
        self.repeated += len(value) if type(value) in (str, bytes, tuple) else 1
        if self.repeated > _FREE + _REPEATS * len(self.data):
            raise Refused("repeats values far beyond its own length")
        self.fixed.add(id(value))
        return value


def _attributes(value: Any) -> Iterable[Any]:
    return () if isinstance(value, type) else getattr(value, "__dict__", {}).values()


_STOP = ord(".")
# Opcodes that push a value. The standard library's names stand beside those that are no plain letters.
_PUSHED: dict[int, Callable[[_Interpreter], Any]] = {
    ord("N"): lambda its: None,
    0x88: lambda its: True,  # NEWTRUE
    0x89: lambda its: False,  # NEWFALSE
    ord(")"): lambda its: (),
    ord("]"): lambda its: [],
    ord("}"): lambda its: {},
    ord("K"): lambda its: its.number("<B"),
    ord("M"): lambda its: its.number("<H"),
    ord("J"): lambda its: its.number("<i"),
    ord("G"): lambda its: its.number(">d"),
    0x8A: lambda its: int.from_bytes(its.take(its.number("<B")), "little", signed=True),  # LONG1
    0x8C: lambda its: its.text("<B"),  # SHORT_BINUNICODE
    ord("X"): lambda its: its.text("<I"),
    ord("h"): lambda its: its.again(its.number("<B")),
    ord("j"): lambda its: its.again(its.number("<I")),
    ord("t"): lambda its: tuple(its.since_mark()),
    0x85: lambda its: tuple(its.last(1)),  # TUPLE1
    0x86: lambda its: tuple(its.last(2)),  # TUPLE2
    0x87: lambda its: tuple(its.last(3)),  # TUPLE3
    0x93: lambda its: its.named(*its.last(2)),  # STACK_GLOBAL
    ord("c"): lambda its: its.named(its.line(), its.line()),
    0x81: _Interpreter.called,  # NEWOBJ
    ord("R"): _Interpreter.called,
    ord("Q"): _Interpreter.from_outside,
}
# Opcodes that change what is there
_DONE: dict[int, Callable[[_Interpreter], Any]] = {
    0x95: lambda its: its.take(8),  # FRAME: its length, which a reader from memory has no use for
    ord("("): lambda its: its.marks.append(len(its.stack)),
    0x94: lambda its: its.memorize(len(its.memo)),  # MEMOIZE
    ord("q"): lambda its: its.memorize(its.number("<B")),
    ord("r"): lambda its: its.memorize(its.number("<I")),
    ord("s"): lambda its: its.put(its.last(2)),
    ord("u"): lambda its: its.put(its.since_mark()),
    ord("a"): lambda its: its.extend(its.last(1)),
    ord("e"): lambda its: its.extend(its.since_mark()),
    ord("b"): _Interpreter.build,
}
