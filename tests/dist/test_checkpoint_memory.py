"""What a save and a load take beside what a run holds anyway: no more than a rank's share, and a constant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.flags import PADDED
from tests.support.pool import Pools
from tests.support.training import SMALL, started, train

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
    import torch.distributed as dist

    from megavlm.checkpoint import state
    from megavlm.checkpoint.folders import Keep
    from megavlm.checkpoint.saving import Saver
    from megavlm.train.loop import close
    from tests.support.live_bytes import LiveBytes, standing_tensors

    run = started(argv, run_dir)
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
    close(run)
    return found


def _bytes_in(folder: Path, files: str) -> int:
    """Bytes of the tensors in files whose names begin so, without what the format puts around each."""
    from torch.distributed.checkpoint import FileSystemReader

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
        pytest.param("--tp 2 --precision bf16", marks=pytest.mark.slow),
        pytest.param("--precision bf16 --offload optimizer", marks=pytest.mark.slow),
        pytest.param("--data-parallel-sharding full", marks=pytest.mark.slow),
        pytest.param("--data-parallel-sharding optimizer --hybrid-shard-size 2", marks=pytest.mark.slow),
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


def saved_again(argv: list[str], run_dir: str, into: str) -> None:
    """Resume a run, and save it as it is."""

    from megavlm.checkpoint import state
    from megavlm.checkpoint.folders import Keep
    from megavlm.checkpoint.saving import Saver
    from megavlm.train.loop import close

    run = started(argv, run_dir)
    position = state.Position(iteration=run.position.iteration, loader=run.position.loader)
    saver = Saver(Path(into), Keep(0))
    state.save(run.engine.trained(), position, config=run.config, plan=run.plan, saver=saver)
    saver.wait()
    saver.close()
    close(run)


def tensors(folder: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by name, unsharded."""
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load_plain_tensors(folder)
    found = {key: tensor for key, tensor in found.items() if not key.startswith("random.")}
    return {key: tensor for key, tensor in found.items() if isinstance(tensor, torch.Tensor)}


LAYOUTS = (
    (4, "--tp 2"),
    (4, "--data-parallel-sharding full --hybrid-shard-size 2"),
    (2, "--tp 2 --placement colocated --vision-tp 2"),
    (2, "--pp 2 --placement colocated"),
    (2, "--tp 2 --data-parallel-sharding full"),
    (1, "--offload optimizer"),
)


@pytest.mark.slow
def test_saved_at_another_layout_a_checkpoint_is_the_same(pools: Pools, tmp_path: Path) -> None:
    """Bit for bit, master weights, moments and weights, but for the padding that TP may need."""
    argv = [*SMALL, *PADDED.split(), *"--precision bf16 --train-iters 3".split()]
    pools(4).run(train, [*argv, *"--pp 2 --vpp 2".split()], str(tmp_path / "0"))
    (expected,) = pools(1).run(tensors, str(tmp_path / "0/checkpoints/iter_0000003"))
    assert {key.split(".")[2] for key in expected if key.startswith("optimizer.state")} == {
        "param",
        "exp_avg",
        "exp_avg_sq",
    }
    for number, (world, flags) in enumerate(LAYOUTS):
        before, after = tmp_path / str(number), tmp_path / str(number + 1)
        pools(world).run(saved_again, [*argv, *flags.split()], str(before), str(after / "checkpoints"))
        (found,) = pools(1).run(tensors, str(after / "checkpoints/iter_0000003"))
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            common = tuple(slice(min(sizes)) for sizes in zip(tensor.shape, expected[key].shape, strict=True))
            assert tensor[common].equal(expected[key][common]), (flags, key)
            for whole in (tensor, expected[key]):
                rest = whole.clone()
                rest[common] = 0
                assert not rest.any(), (flags, key)
