"""Load Hugging Face weights: into the chunks of a rank, which reads only its slices, or into a checkpoint, streamed.

torch's checkpoint writer asks its planner for each item's values when it writes them. The planner here declares all
items from the files' headers, and reads values when it is asked for them. The result is what a run would have saved,
without optimizer state.
"""

from __future__ import annotations

import json
import math
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megavlm.checkpoint import folders
from megavlm.checkpoint.hf.checkpoint_reader import Stored
from megavlm.checkpoint.hf.files import PIECE_BYTES, THREADS, for_each
from megavlm.checkpoint.hf.pretrained import Pretrained, refuse
from megavlm.checkpoint.hf.sidecar import NAME, write_sidecar
from megavlm.checkpoint.items import STATE, write_items
from megavlm.checkpoint.manifest import SUMMARY, FileSum, SummingFile
from megavlm.checkpoint.staging import alone, without_record_sums
from megavlm.checkpoint.summary import FORMAT
from megavlm.config.schema import Config
from megavlm.families.shared.table import Shape
from megavlm.files import open_new, replace_file
from megavlm.model.vlm import VLMChunk
from megavlm.model.weights import index_of, initialize, named_shards, real_shape


def import_checkpoint(
    pretrained: Pretrained, shapes: Mapping[str, Shape], config: Config, plan: Any, *, root: Path
) -> Path:
    """Write the checkpoint `root`/iter_0000000 with weights in the type of the files; return its folder.

    `shapes` has the shape of each parameter by global name, without the padding that tensor parallelism adds.
    """
    temporary = folders.prepare(root, 0)
    stored = {key: Stored(shape, pretrained.dtype_of(key)) for key, shape in shapes.items()}
    writer = _StreamingWriter(temporary, sync_files=False)  # `commit` flushes the files
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process converts
        dcp.save(
            dict.fromkeys(stored),
            storage_writer=writer,
            planner=_StreamingPlanner(pretrained, stored),
            no_dist=True,
        )
    save_config(CheckpointingConfig("torch_dist"), str(temporary))
    torch.save({}, temporary / "common.pt")
    replace_file(temporary / STATE, "{}\n")
    write_sidecar(pretrained, temporary / NAME)
    summary = {
        "format": FORMAT,
        "contents": "weights",
        "iteration": 0,
        "consumed_samples": 0,
        "plan": plan.to_json(),
        "model": json.loads(json.dumps(asdict(config.model))),
    }
    replace_file(temporary / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return folders.commit(root, 0, writer.sums)


class _StreamingPlanner(DefaultSavePlanner):
    def __init__(self, pretrained: Pretrained, stored: Mapping[str, Stored]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pretrained = pretrained
        self.stored = stored

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for key, tensor in self.stored.items() for item in _items(key, tensor)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None
        chunk, key = write_item.tensor_data.chunk, write_item.index.fqn
        index = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        values = self.pretrained.read_slice(key, self.stored[key].shape, index)
        return values.to(self.stored[key].dtype)


class _StreamingWriter(dcp.FileSystemWriter):
    """Writes one file per thread and frees each item once it is written; torch's writer keeps all tensors of a file.

    torch's sums of records are left out, which no reader looks at; `sums` has those of the files.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sums: dict[str, FileSum] = {}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        places = {each.index: each.storage_data for part in results for each in part}
        write_items(Path(self.path), metadata, places)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items, lock = iter(plan.items), threading.Lock()
        results: list[WriteResult] = []

        def next_item() -> WriteItem | None:
            with lock:
                return next(items, None)

        def fill(name: str) -> None:
            with open_new(Path(self.path) / name, buffering=0) as unsummed, without_record_sums():
                file = SummingFile(unsummed)
                while (item := next_item()) is not None:
                    offset = file.tell()
                    torch.save(alone(cast(Tensor, planner.resolve_data(item))), cast("IO[bytes]", file))
                    file.end_item()
                    length = file.tell() - offset
                    results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
                self.sums[name] = file.sum

        with without_record_sums():
            for_each(fill, [f"__0_{number}.distcp" for number in range(THREADS)])
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _items(key: str, tensor: Stored) -> Iterator[WriteItem]:
    """Yield the items that make up a tensor: consecutive rows, at most PIECE_BYTES (at least one row) each."""
    row = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    rows = max(1, PIECE_BYTES // row)
    for number, start in enumerate(range(0, tensor.shape[0], rows)):
        offsets = torch.Size([start, *(0 for _ in tensor.shape[1:])])
        sizes = torch.Size([min(rows, tensor.shape[0] - start), *tensor.shape[1:]])
        yield WriteItem(
            index=MetadataIndex(key, offsets, number),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, sizes),
                properties=TensorProperties(dtype=tensor.dtype),
                size=torch.Size(tensor.shape),
            ),
        )


@torch.no_grad()
def load_weights(
    chunks: Sequence[VLMChunk], pretrained_list: Sequence[Pretrained], config: Config, *, vocab_size: int
) -> None:
    """Set the weights of `chunks` from pretrained folders, and draw the others (such as a new projector's) at random.

    Every rank calls it. Raises UserError on all ranks, listing every missing, surplus or wrongly shaped tensor.
    """
    _check(chunks, pretrained_list, config, vocab_size=vocab_size)
    for chunk in chunks:
        initialize(chunk, config, vocab_size=vocab_size, drawn=lambda key: _provider(pretrained_list, key) is None)
        for shard in named_shards(chunk):
            if (pretrained := _provider(pretrained_list, shard.key)) is not None:
                real = real_shape(shard.key, tuple(shard.global_shape), config.model, vocab_size=vocab_size)
                shard.data.copy_(pretrained.read_slice(shard.key, real, index_of(shard)))


def _provider(pretrained_list: Sequence[Pretrained], key: str) -> Pretrained | None:
    return next((pretrained for pretrained in pretrained_list if pretrained.provides(key)), None)


def _check(
    chunks: Sequence[VLMChunk], pretrained_list: Sequence[Pretrained], config: Config, *, vocab_size: int
) -> None:
    shapes = {
        shard.key: real_shape(shard.key, tuple(shard.global_shape), config.model, vocab_size=vocab_size)
        for chunk in chunks
        for shard in named_shards(chunk)
    }
    for pretrained in pretrained_list:
        # A rank sees the shapes of its own chunks only, and all ranks must stop together.
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, pretrained.wrong_shapes(shapes))
        wrong = sorted({problem for problems in found for problem in problems})
        refuse(
            [*pretrained.problems(), *wrong],
            f"{pretrained.folder.path} does not hold the model that its config.json says",
        )
