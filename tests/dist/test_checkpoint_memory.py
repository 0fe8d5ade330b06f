"""What a save and a load take beside what a run holds anyway: no more than a rank's share, and a constant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from megavlm.checkpoint import state
from megavlm.checkpoint.folders import Keep
from megavlm.checkpoint.saving import Saver
from tests.support.covering import slow
from tests.support.live_bytes import LiveBytes, standing_tensors
from tests.support.pool import Pools
from tests.support.training import started

MODEL = (
    "--global-batch-size 4 --micro-batch-size 1 --seq-length 32 --no-tensorboard --set "
    "model.language.tie_embeddings=true model.vision.num_layers=2 model.vision.hidden_size=64 "
    "model.vision.ffn_hidden_size=128 model.vision.num_attention_heads=4 model.vision.image_size=16 "
    "model.vision.patch_size=4 model.projector.pixel_shuffle=2 model.language.hidden_size=128 "
    "model.language.ffn_hidden_size=384 model.language.num_attention_heads=4 model.language.num_query_groups=2 "
    "model.language.vocab_size=256 --images-per-sample 1"
).split()


def bytes_taken(argv: list[str], run_dir: str) -> dict[str, int]:
    """Of this rank, after a step: its share of what is saved, most bytes alive beside the run in a save and in a load,
    bytes written, and the largest tensor.
    """
    with started(argv, run_dir) as run:
        run.engine.train_step(run.data_loader.next_step().batches)
        trained, position = run.engine.trained(), state.Position(iteration=1, loader={})
        weights = [param for chunk in run.engine.model_chunks for param in chunk.parameters()]
        groups = [group for part in run.engine.optimizer.chained_optimizers for group in part.param_groups]
        masters = sum(param.numel() for group in groups for param in group["params"])
        found = {
            "share": 12 * masters + sum(w.numel() * w.itemsize for w in weights) // run.engine.groups.dp.size(),
            "largest": max(w.numel() * 4 for w in weights),
        }
        with LiveBytes(standing_tensors(run.engine)) as counter:
            before = counter.live
            saver = Saver(Path(run_dir), Keep(0))
            state.save(trained, position, config=run.config, plan=run.plan, saver=saver)
            saver.wait()
            (report,) = saver.poll()
            assert report.error is None
            folder = report.folder
            found["save"] = counter.peak - before
        saver.close()
        dist.barrier()  # rank 0 has committed it
        with LiveBytes(standing_tensors(run.engine)) as counter:
            before = counter.live
            state.load(trained, folder, config=run.config, plan=run.plan)
            found["load"] = counter.peak - before
        found["written"] = _bytes_in(folder, f"__{dist.get_rank()}_")
    return found


def _bytes_in(folder: Path, files: str) -> int:
    """Bytes of the tensors in files whose names begin so, without what the format puts around each."""
    metadata = FileSystemReader(folder).read_metadata()
    size = 0
    for index, place in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        if place.relative_path.startswith(files) and index.offset is not None:
            (chunk,) = (each for each in entry.chunks if each.offsets == index.offset)
            size += chunk.sizes.numel() * entry.properties.dtype.itemsize
    return size


@pytest.mark.parametrize(
    "flags",
    [
        "",
        slow("--tp 2 --precision bf16"),
        slow("--precision bf16 --offload optimizer"),
        slow("--data-parallel-sharding full"),
        slow("--data-parallel-sharding optimizer --hybrid-shard-size 2"),
    ],
)
def test_a_save_takes_a_ranks_share_and_a_load_one_tensor(pools: Pools, tmp_path: Path, flags: str) -> None:
    """With four times the layers, too: what comes on top is the largest tensor, which is not divided."""
    ranks = [
        rank
        for layers in ("1", "4")
        for rank in pools(4).run(
            bytes_taken,
            [*MODEL, *flags.split(), "--set", f"model.language.num_layers={layers}"],
            str(tmp_path / layers),
        )
    ]
    (largest,) = {rank["largest"] for rank in ranks}
    for rank in ranks:
        assert rank["save"] <= rank["share"] + largest, rank
        assert rank["written"] <= rank["share"] + largest, rank
        assert rank["load"] <= largest + 2**17, rank  # what ranks tell each other of their parts
