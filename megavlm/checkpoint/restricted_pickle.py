"""Read a pickle as data, with an interpreter for only the few opcodes that plain objects are written with.

Python's unpickler calls what a file tells it to call. This one looks names up in a table of exact objects, can neither
import nor take attributes, and leaves calling to its caller. It reads protocol 2, which `torch.save` writes, and
protocols 4 and 5, which torch and megatron-core write otherwise; the standard library's `pickletools` describes the
opcodes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[Any, tuple[Any, ...]], Any]
Build = Callable[[Any, Any], None]

_CONSTANTS: dict[int, Callable[[], Any]] = {
    ord("N"): lambda: None,
    0x88: lambda: True,
    0x89: lambda: False,
    ord(")"): tuple,
    ord("]"): list,
    ord("}"): dict,
}
# opcode → how its argument is laid out
_NUMBERS = {ord("K"): "<B", ord("M"): "<H", ord("J"): "<i", ord("G"): ">d"}
_TEXTS = {0x8C: "<B", ord("X"): "<I"}
_MEMO_READS = {ord("h"): "<B", ord("j"): "<I"}
_MEMO_WRITES = {ord("q"): "<B", ord("r"): "<I"}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_PROTO, _FRAME, _STOP, _MARK, _LONG1, _MEMOIZE = 0x80, 0x95, ord("."), ord("("), 0x8A, 0x94
_TUPLE, _APPEND, _APPENDS, _SETITEM, _SETITEMS = ord("t"), ord("a"), ord("e"), ord("s"), ord("u")
_STACK_GLOBAL, _NEWOBJ, _REDUCE, _BUILD = 0x93, 0x81, ord("R"), ord("b")
_GLOBAL, _PERSISTENT = ord("c"), ord("Q")
_PROTOCOLS = (2, 4, 5)
_LONGEST_NAME = 200  # bytes


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

    `objects`: (module, name) → what the pickle may name. `call` makes an object of one of these and arguments; `build`
    gives an object its state; `persistent` returns what lies outside of the pickle; None: no pickle may ask for that.
    `keys`: types of the keys of dicts, which must be quick to hash. Raises Refused for anything beyond that, and
    ValueError, IndexError, TypeError or another error where the bytes are damaged.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    if data[:1] != b"\x80" or data[1] not in _PROTOCOLS:
        raise Refused("is a pickle of a protocol that is not read here")
    at = 2

    def number(layout: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(layout, data, at)
        at += struct.calcsize(layout)
        return value

    def take(count: int) -> bytes:
        nonlocal at
        found = data[at : at + count]
        if len(found) != count:
            raise ValueError("it ends too early")
        at += count
        return found

    def since_mark() -> list[Any]:
        start = marks.pop()
        found = stack[start:]
        del stack[start:]
        return found

    def put(items: list[Any]) -> None:
        if type(stack[-1]) is not dict or not all(type(key) in keys for key in items[::2]):
            raise Refused("has a dict whose keys are not known here")
        stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def extend(items: list[Any]) -> None:
        if type(stack[-1]) is not list:
            raise Refused("appends to what is no list")
        stack[-1].extend(items)

    def line() -> str:
        nonlocal at
        end = data.index(b"\n", at, at + _LONGEST_NAME)
        found = str(data[at:end], "utf-8")
        at = end + 1
        return found

    def named(module: Any, name: Any) -> Any:
        if type(name) is not str or type(module) is not str or (module, name) not in objects:
            raise Refused(f"names {module!s:.80}.{name!s:.80}, which no tensor checkpoint needs")
        return objects[module, name]

    while True:
        opcode = data[at]
        at += 1
        if opcode == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif opcode in _MEMO_WRITES:
            memo[number(_MEMO_WRITES[opcode])] = stack[-1]
        elif opcode in _MEMO_READS:
            stack.append(memo[number(_MEMO_READS[opcode])])
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode]())
        elif opcode in _NUMBERS:
            stack.append(number(_NUMBERS[opcode]))
        elif opcode == _MARK:
            marks.append(len(stack))
        elif opcode in _TUPLES:
            count = _TUPLES[opcode]
            stack[-count:] = [tuple(stack[-count:])]
        elif opcode == _TUPLE:
            stack.append(tuple(since_mark()))
        elif opcode in (_NEWOBJ, _REDUCE):
            arguments = stack.pop()
            if type(arguments) is not tuple:
                raise Refused("calls with what is no tuple")
            stack.append(call(stack.pop(), arguments))
        elif opcode == _BUILD and build is not None:
            state = stack.pop()
            build(stack[-1], state)
        elif opcode in _TEXTS:
            stack.append(str(take(number(_TEXTS[opcode])), "utf-8"))
        elif opcode == _SETITEMS:
            put(since_mark())
        elif opcode == _SETITEM:
            item = stack[-2:]
            del stack[-2:]
            put(item)
        elif opcode == _APPENDS:
            extend(since_mark())
        elif opcode == _APPEND:
            extend([stack.pop()])
        elif opcode == _STACK_GLOBAL:
            name, module = stack.pop(), stack.pop()
            stack.append(named(module, name))
        elif opcode == _GLOBAL:
            module, name = line(), line()
            stack.append(named(module, name))
        elif opcode == _PERSISTENT and persistent is not None:
            stack.append(persistent(stack.pop()))
        elif opcode == _LONG1:
            stack.append(int.from_bytes(take(number("<B")), "little", signed=True))
        elif opcode == _FRAME:
            take(8)  # its length, which a reader from memory has no use for
        elif opcode == _STOP:
            return stack.pop()
        else:
            raise Refused(f"has the opcode {opcode:#04x}, which no tensor checkpoint needs")
