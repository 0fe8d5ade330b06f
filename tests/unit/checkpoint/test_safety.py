"""Nothing that a checkpoint holds is run, whatever carries it, and nothing is read from outside its folder."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megavlm import backend

backend.activate()

from megavlm.checkpoint.reading import Planner, Reader, common_state  # noqa: E402
from megavlm.checkpoint.records import check_record  # noqa: E402
from megavlm.checkpoint.safety import read_metadata  # noqa: E402
from megavlm.checkpoint.tensor_files import without_record_sums  # noqa: E402
from megavlm.errors import UserError  # noqa: E402
from tests.support.manifests import write_sums  # noqa: E402


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


DOTTED = named("torch", "float32.__class__.__base__.__getattribute__")
SIZE, INDEX = named("torch", "Size"), named("torch.distributed.checkpoint.metadata", "MetadataIndex")
ATTACKS = {
    "protocol 0": b"cos\nsystem\n(Vecho\ntR.",
    "protocol 2": b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00echo\x85R.",
    "INST": b"\x80\x04(X\x04\x00\x00\x00echoios\nsystem\n.",
    "OBJ": b"\x80\x04(" + named("os", "system") + text("echo") + b"o.",
    "STACK_GLOBAL": b"\x80\x04" + named("os", "system") + text("echo") + b"\x85R.",
    "dotted name": b"\x80\x04" + DOTTED + named("torch.serialization", "_get_layout") + text("__globals__") + b"\x86R.",
    "begins like a dtype": b"\x80\x04" + named("torch", "int_repr") + b".",
    "EXT1": b"\x80\x04\x82\x01.",
    "persistent id": b"\x80\x04" + text("x") + b"Q.",
    "buffer": b"\x80\x05\x97.",
    "state of a class": b"\x80\x04" + INDEX + b"}" + text("__setstate__") + SIZE + b"sb.",
    "attributes by slots": b"\x80\x04" + INDEX + b")\x81N}" + text("fqn") + SIZE + b"s\x86b.",
    "call of a string": b"\x80\x04" + text("echo") + b")R.",
    "other class": b"\x80\x04" + named("builtins", "list") + b")\x81.",
    "memo of four billion": b"\x80\x04Nr\xff\xff\xff\xff.",
    "slow hash": b"\x80\x04}" + b")" + b"2\x86" * 60 + b"Ns.",
    "slow hash in a size": b"\x80\x04" + SIZE + b")" + b"\x94h\x00\x86" * 9 + b"\x85R.",
    "negative size": b"\x80\x04" + SIZE + b"J\xff\xff\xff\xff\x85\x85R.",
    "other root": b"\x80\x04}.",
    "endless text": b"\x80\x04X\xff\xff\xff\xffabc.",
    "nothing": b"",
    "no pickle": b"not a pickle",
    "stack is empty": b"\x80\x04\x85.",
    "nothing to memoize": b"\x80\x04\x94.",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_metadata_that_says_anything_else_is_refused_in_one_line(tmp_path: Path, attack: bytes):
    (tmp_path / ".metadata").write_bytes(attack)
    with pytest.raises(UserError, match=r"^\S+\.metadata .*(not loaded|another checkpoint)$"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("protocol", range(6))
def test_no_protocol_carries_code(tmp_path: Path, protocol: int):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "ran"), protocol))
    with pytest.raises(UserError):
        read_metadata(tmp_path)
    assert not (tmp_path / "ran").exists()


def saved(folder: Path) -> Path:
    """A checkpoint with a tensor in two types and an entry that is none."""
    state = {"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2).bfloat16(), "random/shard_0_1": ("a", 1)}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def rewritten(folder: Path, change: Callable[[Metadata], None]) -> Path:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return folder


def test_what_torch_writes_is_read_as_torch_reads_it(tmp_path: Path):
    saved(tmp_path)
    write_sums(tmp_path)
    expected = pickle.loads((tmp_path / ".metadata").read_bytes())
    found = read_metadata(tmp_path)
    assert (found.state_dict_metadata, found.storage_data) == (expected.state_dict_metadata, expected.storage_data)
    state = {"weight": torch.zeros(2, 3), "half": torch.zeros(2).bfloat16(), "random/shard_0_1": None}
    dcp.load(state, storage_reader=Reader(tmp_path), planner=Planner(), no_dist=True)
    assert torch.equal(state["weight"], torch.arange(6.0).reshape(2, 3))
    assert state["random/shard_0_1"] == ("a", 1)


def place_of(metadata: Metadata, name: str) -> _StorageInfo:
    return next(place for index, place in metadata.storage_data.items() if index.fqn == name)


def lengthen(metadata: Metadata) -> None:
    place_of(metadata, "weight").length += 10**6


def begin_before(metadata: Metadata) -> None:
    place_of(metadata, "weight").offset = -4


def shift(metadata: Metadata) -> None:
    """A piece as large as its tensor that begins at its second row."""
    (chunk,) = metadata.state_dict_metadata["weight"].chunks
    chunk.offsets = torch.Size([1, 0])
    metadata.storage_data[MetadataIndex("weight", chunk.offsets)] = place_of(metadata, "weight")


def enlarge(metadata: Metadata) -> None:
    metadata.state_dict_metadata["weight"].size = torch.Size([2**40, 3])


def enlarge_wholly(metadata: Metadata) -> None:
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2**40, 3]))
    metadata.state_dict_metadata["weight"] = TensorStorageMetadata(
        TensorProperties(torch.float32), chunk.sizes, [chunk]
    )


def lead_out(name: str) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        place_of(metadata, "weight").relative_path = name

    return change


def decompress(metadata: Metadata) -> None:
    place_of(metadata, "weight").transform_descriptors = ["zstd"]


def misname(metadata: Metadata) -> None:
    metadata.state_dict_metadata["other"] = BytesStorageMetadata()


def mistype(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("weight", [0, 0])] = "__0_0.distcp"


@pytest.mark.parametrize(
    "change",
    [
        lengthen,
        begin_before,
        shift,
        enlarge,
        enlarge_wholly,
        lead_out("/etc/passwd"),
        lead_out("../outside"),
        lead_out("link"),
        lead_out("fifo"),
        lead_out("missing"),
        lead_out(""),
        lead_out("x" * 5000),
        decompress,
        misname,
        mistype,
    ],
)
def test_descriptions_stay_within_the_folder_and_its_files(tmp_path: Path, change: Callable[[Metadata], None]):
    (tmp_path / "outside").write_bytes(b"x" * 2**20)
    folder = saved(tmp_path / "checkpoint")
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(tmp_path / "outside")
    rewritten(folder, change)
    with pytest.raises(UserError, match=r"is damaged|not loaded"):
        read_metadata(folder)


@pytest.mark.parametrize("size", [[1] * 17, [2, -1], [2**62]])
def test_shapes_are_bounded(tmp_path: Path, size: list[int]):
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["weight"].size = torch.Size(size)

    with pytest.raises(UserError, match="is no shape"):
        read_metadata(rewritten(saved(tmp_path), change))


def test_classes_are_called_without_arguments(tmp_path: Path):
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + INDEX + text("name") + b"\x85R.")
    with pytest.raises(UserError, match=r"calls .*MetadataIndex"):
        read_metadata(tmp_path)


def test_names_in_messages_are_one_line(tmp_path: Path):
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + named("torch.a\nb", "x\ry") + b".")
    with pytest.raises(UserError, match=r"^\S+ names 'torch\.a\\nb\.x\\ry', which [^\n]*$"):
        read_metadata(tmp_path)


def test_a_fifo_is_no_metadata(tmp_path: Path):
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(UserError, match="not a complete"):
        read_metadata(tmp_path)


def test_descriptions_are_no_longer_than_what_they_describe(tmp_path: Path):
    """Each byte of a pickle may be an object of 64; each piece of a tensor has more bytes in a data file."""
    folder = saved(tmp_path)
    with (folder / ".metadata").open("r+b") as file:
        file.truncate(2**25)
    with pytest.raises(UserError, match="not a complete"):
        read_metadata(folder)
    with (folder / "__0_1.distcp").open("wb") as file:
        file.truncate(2**25)
    read_metadata(folder)


def test_missing_metadata_is_an_incomplete_checkpoint(tmp_path: Path):
    with pytest.raises(UserError, match="not a complete"):
        read_metadata(tmp_path)


def replace_entry(folder: Path, name: str, content: bytes, entry: BytesStorageMetadata | None = None) -> None:
    """Put other bytes in place of an entry, and another description where one is given."""
    (folder / "__0_9.distcp").write_bytes(content)

    def change(metadata: Metadata) -> None:
        place = place_of(metadata, name)
        place.relative_path, place.offset, place.length = "__0_9.distcp", 0, len(content)
        if entry is not None:
            metadata.state_dict_metadata[name] = entry
            metadata.storage_data[MetadataIndex(name)] = place

    rewritten(folder, change)


@pytest.mark.parametrize("as_zip", [True, False])
@pytest.mark.parametrize(
    ("name", "entry"),
    [("random/shard_0_1", None), ("weight", None), ("weight", BytesStorageMetadata())],
    ids=["random state", "tensor", "tensor said to be none"],
)
def test_no_entry_runs_anything(tmp_path: Path, name: str, entry: BytesStorageMetadata | None, as_zip: bool):
    folder, buffer = saved(tmp_path / "checkpoint"), io.BytesIO()
    torch.save({"cpu": Touch(tmp_path / "ran")}, buffer, _use_new_zipfile_serialization=as_zip)
    replace_entry(folder, name, buffer.getvalue(), entry)
    write_sums(folder)
    wanted = {"weight": torch.zeros(2, 3)} if name == "weight" else {name: None}
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(wanted, storage_reader=Reader(folder), planner=Planner(), no_dist=True)
    assert not (tmp_path / "ran").exists()


def test_what_is_compressed_is_not_unpacked(tmp_path: Path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(2**20))
    with pytest.raises(UserError, match="compressed"):
        check_record(buffer, "entry")


def test_a_record_may_be_saved_without_sums():
    """As files of checkpoints are: their manifest has a sum of each. A sum that is there must be right."""
    for summed in (True, False):
        buffer = io.BytesIO()
        with contextlib.nullcontext() if summed else without_record_sums():
            torch.save(torch.ones(3), buffer)
        check_record(buffer, "entry")
    damaged = archive(tensor(4, 4, 1), data=bytes(16)).getvalue().replace(b"FloatStorage", b"HalfStorage ")
    with pytest.raises(UserError, match="Bad CRC-32"):
        check_record(io.BytesIO(damaged), "entry")


def archive(pickled: bytes, *, data: bytes = b"") -> io.BytesIO:
    """Return what `torch.save` writes, with another pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name, content in (("data.pkl", pickled), ("version", b"3"), ("data/0", data)):
            file.writestr(f"archive/{name}", content)
    return buffer


def asked(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def long(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little")


STORAGE = b"(" + b"".join([b"X\x07\0\0\0storage", asked("torch", "FloatStorage"), b"X\x01\0\0\x000X\x03\0\0\0cpu%stQ"])


def tensor(elements: int, size: int, stride: int) -> bytes:
    """Return a pickle of a vector in a storage of so many elements."""
    shape = long(size) + b"\x85" + long(stride) + b"\x85\x89"
    return (
        b"\x80\x02" + asked("torch._utils", "_rebuild_tensor_v2")
        + b"(" + STORAGE % long(elements) + b"K\0" + shape + asked("collections", "OrderedDict") + b")RtR."
    )  # fmt: skip


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02" + asked("builtins", "bytearray") + long(10**11) + b"\x85R.",
        b"\x80\x02" + asked("torch.storage", "UntypedStorage") + long(10**11) + b"\x85R.",
        b"\x80\x02" + asked("argparse", "Namespace") + b")\x81.",
        b"\x80\x02" + asked("posix", "system") + b"X\x04\0\0\0echo\x85R.",
        b"\x80\x02" + asked("torch", "FloatStorage") + b")R.",
        tensor(2**40, 1, 1),
        tensor(4, 5, 1),
        tensor(4, 2**40, 0),
        tensor(4, 2, 4),
        b"not a pickle",
    ],
    ids=["bytes", "storage", "namespace", "code", "called", "large storage", "size", "stride 0", "stride", "none"],
)
def test_a_pickle_inside_is_of_tensors_and_plain_values(pickled: bytes):
    """torch's `weights_only` would make bytes and storages of any size out of a file of a hundred bytes."""
    with pytest.raises(UserError, match=r"entry .*(not loaded; use|is damaged)"):
        check_record(archive(pickled, data=bytes(16)), "entry")


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, 4),
        torch.ones(6, 4)[2:4],
        torch.ones(2).bfloat16(),
        torch.zeros(0, 3),
        torch.tensor(1.0),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
        torch.nn.Parameter(torch.ones(2)),
        {"a": [1, 2.5, None, True, "x", b"y", (1, 2)], 3: {"deep": {"er": torch.ones(2)}}, "n": 2**70},
        pytest.param(torch.get_rng_state(), id="random state"),
    ],
    ids=str,
)
def test_what_checkpoints_hold_is_read(tmp_path: Path, value: Any):
    torch.save({"value": value}, tmp_path / "common.pt")
    found = common_state(tmp_path)["value"]
    assert str(found) == str(value)


@pytest.mark.parametrize("value", [[1], 7, None])
def test_what_is_common_to_all_ranks_is_a_dict(tmp_path: Path, value: Any):
    torch.save(value, tmp_path / "common.pt")
    with pytest.raises(UserError, match="holds no dict"):
        common_state(tmp_path)
