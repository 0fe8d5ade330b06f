"""Short pickles that are large to whoever walks over them, and where a checkpoint's reader may meet them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator

_DOUBLINGS, _DEEP, _MANY = 45, 5_000, 20_000
_MODULUS = 2**61 - 1  # of Python's hashes of numbers: its multiples all have the hash 0


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def put(place: int) -> bytes:
    return b"r" + place.to_bytes(4, "little")


def get(place: int) -> bytes:
    return b"j" + place.to_bytes(4, "little")


def number(value: int) -> bytes:
    return b"\x8a\x10" + value.to_bytes(16, "little")


def _doubled(first: bytes, pair: bytes) -> bytes:
    """Return a value of two values, each of two, and so on; in `pair`, % stands for the value before."""
    return first + put(0) + b"".join(pair.replace(b"%", get(i)) + put(i + 1) for i in range(_DOUBLINGS))


INDEX = named("torch.distributed.checkpoint.metadata", "MetadataIndex")
TENSOR = named("torch.distributed.checkpoint.metadata", "TensorStorageMetadata")
PROPERTIES = named("torch.distributed.checkpoint.metadata", "TensorProperties")

BOMBS = {
    "tuples": _doubled(b")", b"%%\x86"),
    "lists": _doubled(b"]", b"](%%e"),
    "dicts": _doubled(b"}", b"}(K\x00%K\x01%u"),
    "lists, filled late": b"".join(b"]" + put(i) for i in range(_DOUBLINGS))
    + b"(" + b"".join(get(i) + b"(" + get(i + 1) * 2 + b"e" for i in range(_DOUBLINGS - 1)) + b"t",
    "objects, filled late": b"".join(TENSOR + b")\x81" + put(i) for i in range(_DOUBLINGS))
    + b"(" + b"".join(get(i) + b"}" + text("chunks") + b"](" + get(i + 1) * 2 + b"esb" for i in range(_DOUBLINGS - 1))
    + b"t",
    "a list in itself": b"]" + put(0) + get(0) + b"a",
    "deep tuple": b")" + b"\x85" * _DEEP,
    "deep list": b"]" * _DEEP + b"a" * (_DEEP - 1),
    "deep dict": (b"}" + text("a")) * _DEEP + b"}" + b"s" * _DEEP,
}  # fmt: skip
WIDE = {
    "long text, often": text("x" * _MANY) + put(0) + b"(" + get(0) * _MANY + b"t",
    "wide tuple, often": b"(" + b"K\x00" * _MANY + b"t" + put(0) + b"(" + get(0) * _MANY + b"t",
    "bytes": text("x" * 10**6) + put(0) + text("latin1") + put(1) + named("_codecs", "encode") + put(2)
    + b"(" + (get(2) + get(0) + get(1) + b"\x86R") * 2_000 + b"t",
    "equal hashes": b"}(" + b"".join(number(i * _MODULUS) + b"N" for i in range(200_000)) + b"u",
    "objects of equal hashes": b"}("
    + b"".join(INDEX + b")\x81}" + text("index") + number(i * _MODULUS) + b"sbN" for i in range(_MANY)) + b"u",
    "very deep tuple": b")" + b"\x85" * 50 * _DEEP,
}  # fmt: skip

_STORAGE = [text("storage"), named("torch", "FloatStorage"), text("0"), text("cpu"), b"K\x01"]
_REBUILT = [b"(" + b"".join(_STORAGE) + b"tQ", b"K\x00", b"K\x01\x85", b"K\x01\x85", b"\x89",
            named("collections", "OrderedDict") + b")R"]  # fmt: skip
_CALLED = [
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("pathlib", "PosixPath"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
]


def _places(bomb: bytes) -> Iterator[bytes]:
    """Yield pickles that have a bomb in each place of which a reader could want to know what is there."""
    yield bomb
    yield bomb + text("x") + b"\x93"  # a module, and a name
    yield text("torch") + bomb + b"\x93"
    yield bomb + b")R"  # what is called
    yield bomb + b"Q"  # what lies outside
    yield bomb + b"Na"  # what is appended to, has keys, has a state
    yield bomb + b"NNs"
    yield bomb + b"}b"
    yield b"}" + bomb + b"Ns"  # a key, a value
    yield b"}" + text("position") + bomb + b"s"
    for name in _CALLED:
        yield named(*name) + bomb + b"R"
        yield named(*name) + bomb + b"\x85R"
        yield named(*name) + text("x") + bomb + b"\x86R"
    yield INDEX + b")\x81" + bomb + b"b"  # a state, its names and values
    yield INDEX + b")\x81}" + bomb + b"Nsb"
    yield INDEX + b")\x81}" + text("fqn") + bomb + b"sb"
    yield PROPERTIES + b")\x81" + bomb + b"b"
    yield PROPERTIES + b")\x81(" + bomb + b"NNNNtb"
    for number in range(len(_STORAGE)):
        yield b"(" + b"".join([*_STORAGE[:number], bomb, *_STORAGE[number + 1 :]]) + b"tQ"
    for number in range(len(_REBUILT)):
        arguments = b"".join([*_REBUILT[:number], bomb, *_REBUILT[number + 1 :]])
        yield named("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"


def pickles(*, whole: bool) -> list[bytes]:
    """Return pickles with a bomb in each place; as a `whole`, each bomb in each place, but those that are long
    themselves in three.
    """
    placed = [list(_places(bomb)) for bomb in BOMBS.values()]
    short = [each for number, place in enumerate(zip(*placed, strict=True)) for each in _of(place, number, whole)]
    long = [(bomb, b"}" + bomb + b"Ns", bomb + b")R") for bomb in WIDE.values()]
    return [b"\x80\x02" + each + b"." for each in (*short, *(each for place in long for each in _of(place, 0, whole)))]


def _of(place: tuple[bytes, ...], number: int, whole: bool) -> tuple[bytes, ...]:
    return place if whole else place[number % len(place) :][:1]


def archived(pickled: bytes) -> bytes:
    """Return what `torch.save` writes, with another pickle in it and one number as its only storage."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name, content in (("data.pkl", pickled), ("version", b"3"), ("data/0", bytes(4))):
            file.writestr(f"archive/{name}", content)
    return buffer.getvalue()
