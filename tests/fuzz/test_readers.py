"""Each reader of other people's files, on damaged ones: success, one line, or a bad sample; within a time.

The fast set tries a few of each with fixed seeds. `MEGAVLM_FUZZ_SECONDS=3600 pytest -m slow tests/fuzz` goes on as long
for each reader, with other seeds each time. What a reader was given lies in `input` of the folder of its attempt: where
it was answered otherwise, copy that to tests/fuzz/found/READER, and every run tries it again.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from PIL import Image
from safetensors.torch import save

from megavlm.checkpoint.hf.files import HfFolder
from megavlm.checkpoint.safety import read_metadata
from megavlm.config.schema import Config, DatasetConfig, ModelConfig
from megavlm.data.decode import decode
from megavlm.data.records import open_records, open_stream, prepare_stream
from megavlm.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megavlm.data.types import BadSample
from megavlm.families import PUBLISHED, family_of, processor_from
from megavlm.families.shared.settings import Settings
from megavlm.json_files import read_json
from tests.fuzz.mutations import mutated
from tests.support import tokenizers
from tests.support.hostile import assert_answered
from tests.support.tar_shards import sample, write_tar

FOUND = Path(__file__).parent / "found"
SECONDS = 20.0  # of processor time for a file, on a slow machine
TURNS = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}]
Reader = Callable[[Path, bytes], Any]


def picture(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(buffer, kind)
    return buffer.getvalue()


def metadata_of() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"a": torch.ones(4, 3), "b": (1, 2)}, checkpoint_id=folder, no_dist=True)
        return (Path(folder) / ".metadata").read_bytes()


def rows() -> bytes:
    buffer = io.BytesIO()
    messages = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]] * 9
    pq.write_table(pa.table({"messages": messages}), buffer)
    return buffer.getvalue()


def tar() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return write_tar(Path(folder) / "0.tar", [sample(str(number)) for number in range(3)]).read_bytes()


def metadata(folder: Path, data: bytes) -> None:
    dcp.save({"a": torch.ones(4, 3), "b": (1, 2)}, checkpoint_id=folder, no_dist=True)
    (folder / ".metadata").write_bytes(data)
    read_metadata(folder)


def config_json(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    settings = Settings(read_json(folder / "config.json"), "config.json")
    family = family_of(settings)
    model = family.config(settings)
    for prefixes in family.name_prefixes:
        family.table(model, prefixes)


def image_processor(folder: Path, data: bytes) -> None:
    (folder / "preprocessor_config.json").write_bytes(data)
    processor = processor_from(read_json(folder / "preprocessor_config.json"), ModelConfig())
    processor.layout(300, 200)


def weights(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    found = HfFolder(folder)
    for name in found.tensors:
        found.read(name, slice(0, 1))


def index(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(SAFETENSORS)
    (folder / "model.safetensors.index.json").write_bytes(data)
    assert HfFolder(folder).tensors is not None


def records(name: str) -> Reader:
    def read(folder: Path, data: bytes) -> None:
        (folder / name).write_bytes(data)
        found = open_records(DatasetConfig(str(folder / name)))
        for number in range(min(len(found), 20)):
            with suppress(BadSample):
                found.read(number)

    return read


def shards(folder: Path, data: bytes, name: str = "0.tar") -> None:
    source = DatasetConfig(str(folder / "data"), kind="webdataset")
    (folder / "data").mkdir()
    (folder / "data" / "0.tar").write_bytes(TAR)
    if name != "0.tar":
        prepare_stream(source, run_dir=folder)
    (folder / "data" / name).write_bytes(data)
    prepare_stream(source, run_dir=folder)
    stream = open_stream(source, run_dir=folder, rank=0, world=1, seed=0)
    for _ in itertools.islice(stream, 5):
        pass


def named(name: str) -> Reader:
    return lambda folder, data: shards(folder, data, name)


def run_config(folder: Path, data: bytes) -> None:
    from megavlm.config.cli import parse

    (folder / "config.yaml").write_bytes(data)
    parse(["--config", str(folder / "config.yaml")])


def tokenizer(folder: Path, data: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    HuggingFaceTokenizer.of(folder).encode("What is in the picture?")


SAFETENSORS = save({"a": torch.ones(4, 3), "b": torch.ones(2).bfloat16()})
TAR = tar()
PREPARED = json.dumps({"shard_counts": {"0.tar": 3}}).encode()
SPLIT = json.dumps({"split_parts": {"train": ["0.tar"]}, "exclude": []}).encode()
CONFIGS = [
    json.dumps({"model_type": family.model_types[0], **values}).encode() for family, values in PUBLISHED.values()
]
CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "image_std": [1, 1, 1],
    "resample": 3,
}
RECORD = {"id": 1, "image": "a.jpg", "conversations": TURNS}

READERS: dict[str, tuple[Reader, list[bytes]]] = {
    "metadata": (metadata, [metadata_of()]),
    "config.json": (config_json, CONFIGS),
    "preprocessor_config.json": (image_processor, [json.dumps(CLIP).encode()]),
    "safetensors": (weights, [SAFETENSORS]),
    "index": (index, [b'{"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}']),
    "json": (records("a.json"), [json.dumps([RECORD] * 5).encode()]),
    "jsonl": (records("a.jsonl"), [b"\n".join([json.dumps(RECORD).encode()] * 5), json.dumps(RECORD).encode()]),
    "parquet": (records("a.parquet"), [rows()]),
    "tar": (shards, [TAR]),
    "tar index": (named("0.tar.idx"), [bytes(8) + (2048).to_bytes(8, "little") * 3]),
    "prepared folder": (named(".nv-meta/.info.json"), [PREPARED]),
    "split": (named(".nv-meta/split.yaml"), [SPLIT]),
    "run config": (run_config, [yaml.safe_dump(json.loads(json.dumps(asdict(Config())))).encode(), b"{}"]),
    "tokenizer": (tokenizer, [tokenizers.llama().to_str().encode()]),
    "image": (
        lambda _, data: decode(data),
        [picture(kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "PPM", "BMP")],
    ),
}


def attempt(name: str, data: bytes, folder: Path) -> None:
    read = READERS[name][0]
    folder.mkdir()
    (folder / "input").write_bytes(data)  # what to keep where this fails
    (folder / "files").mkdir()
    began = time.process_time()
    assert_answered(lambda: read(folder / "files", data))
    assert time.process_time() - began < SECONDS


def attempts(name: str, seed: int) -> Iterator[bytes]:
    random = Random(f"{name} {seed}")
    seeds = READERS[name][1]
    yield from seeds
    while True:
        yield mutated(random.choice(seeds), random)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_answered(name: str, tmp_path: Path) -> None:
    kept = [path.read_bytes() for path in sorted((FOUND / name).glob("*"))]
    few = 4 if name in ("tokenizer", "tar", "tar index", "prepared folder", "split") else 25
    for number, data in enumerate([*kept, *itertools.islice(attempts(name, 0), few)]):
        attempt(name, data, tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_answered_for_long(name: str, tmp_path: Path) -> None:
    import shutil

    end = time.monotonic() + float(os.environ.get("MEGAVLM_FUZZ_SECONDS", "20"))
    for number, data in enumerate(attempts(name, time.time_ns())):
        if time.monotonic() > end:
            break
        attempt(name, data, tmp_path / str(number))
        shutil.rmtree(tmp_path / str(number))
