"""Averages of weights are those of what each step left, at every layout, on resume, in evaluations, and exported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megavlm.checkpoint import folders
from megavlm.checkpoint.hf.checkpoint_reader import CheckpointReader, TrainedReader
from megavlm.programs import convert
from tests.support import hf
from tests.support.covering import slow
from tests.support.flags import HALF
from tests.support.pool import Pools
from tests.support.tiny_models import FAMILIES, square
from tests.support.training import LEAN, started, train, train_composed

SAVING = "--save-interval 1 --keep-checkpoints 0 --ema-decay 0.9"
RUN = [*LEAN, *SAVING.split(), *"--set model.language.tie_embeddings=true".split()]
FULL = "--data-parallel-sharding full"
LAYOUTS = [
    (2, "--tp 2 --micro-batch-size 2 --optimizer muon"),
    slow(2, f"{FULL} --precision bf16 --offload optimizer"),
    slow(4, "--pp 2 --vpp 2 --precision bf16"),
    slow(2, "--placement colocated --optimizer lion --lr 1e-4 --offload optimizer"),
    slow(2, "--data-parallel-sharding none --precision bf16 --tp 2"),
    slow(4, "--data-parallel-sharding optimizer_gradients --hybrid-shard-size 2"),
    slow(2, "--freeze vision --lora-rank 4"),
]


def tensors(checkpoint: Path, prefix: str) -> dict[str, Tensor]:
    """The checkpoint's tensors whose names begin with `prefix`, by the rest of their names."""
    reader = CheckpointReader(checkpoint)
    found = [key for key in reader.stored if key.startswith(prefix)]
    return {key.removeprefix(prefix): reader.read(key, 0, reader.stored[key].shape[0]) for key in found}


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """The fp32 weights of trained parameters."""
    return tensors(checkpoint, "optimizer.state.param.")


@pytest.mark.parametrize(("world", "flags"), LAYOUTS)
def test_averages_are_those_of_the_weights_of_each_step(pools: Pools, tmp_path: Path, world: int, flags: str):
    pools(world).run(train, [*RUN, *flags.split()], str(tmp_path))
    steps = [folder for _, folder in sorted(folders.complete(tmp_path / "checkpoints"))]
    assert len(steps) == 4
    average = tensors(steps[0], "optimizer.state.ema.")
    assert any("linear_fc1" in key or "lora" in key for key in average)
    for folder in steps[1:]:
        left = weights(folder)
        assert average.keys() <= left.keys()
        average = {key: 0.9 * kept + 0.1 * left[key] for key, kept in average.items()}
        for key, kept in tensors(folder, "optimizer.state.ema.").items():
            torch.testing.assert_close(kept, average[key], rtol=1e-6, atol=1e-7, msg=lambda text, key=key: key + text)
            assert not torch.equal(kept, left[key])


@pytest.mark.slow
def test_averages_go_on_at_another_layout(pools: Pools, tmp_path: Path):
    argv = [*LEAN, "--ema-decay", "0.9"]
    pools(1).run(train, argv, str(tmp_path / "whole"))
    pools(2).run(train, [*argv, "--tp", "2", *HALF], str(tmp_path / "halves"))
    pools(2).run(train, [*argv, *FULL.split()], str(tmp_path / "halves"))
    ours, theirs = (
        tensors(folders.newest(tmp_path / name / "checkpoints"), "optimizer.state.ema.")  # type: ignore[arg-type]
        for name in ("halves", "whole")
    )
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sharding", ["optimizer", slow("none")])
def test_averages_may_begin_at_a_checkpoint_without(pools: Pools, tmp_path: Path, sharding: str):
    argv = [*LEAN, "--data-parallel-sharding", sharding, "--save-interval", "1", "--keep-checkpoints", "0"]
    pools(1).run(train, [*argv, *HALF], str(tmp_path))
    pools(1).run(train, [*argv, "--ema-decay", "0.5", "--train-iters", "3"], str(tmp_path))
    _, before, after = (folder for _, folder in sorted(folders.complete(tmp_path / "checkpoints")))
    begun, left = weights(before), weights(after)
    for key, kept in tensors(after, "optimizer.state.ema.").items():
        torch.testing.assert_close(kept, (begun[key] + left[key]) / 2, rtol=0, atol=1e-6)


def losses_of_averages(argv: Sequence[str], run_dir: str) -> list[float]:
    """The loss of averages after two steps, that of weights, and the loss of a third step."""
    with started(argv, run_dir) as run:
        batches = [run.data_loader.next_step().batches for _ in range(3)]
        for batch in batches[:2]:
            run.engine.train_step(batch)
        found = []
        for averages in (True, False):
            object.__setattr__(run.engine, "evaluates_averages", averages)
            with run.engine.evaluation():
                sums = run.engine.schedule.losses(batches[2], num_sources=0)
            if not run.engine.groups.is_first_tp:
                sums.zero_()
            dist.all_reduce(sums)
            found.append(float(sums[0] / sums[1]))
        found.append(run.engine.train_step(batches[2]).loss)
    return found


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        slow(2, FULL.replace("full", "optimizer_gradients")),
        slow(4, "--tp 2 --overlap-grad-reduce --overlap-param-gather"),
        slow(2, "--pp 2 --vpp 2"),
        slow(2, "--placement colocated"),
        slow(2, "--data-parallel-sharding none"),
    ],
)
def test_evaluations_may_use_averages_and_leave_no_trace(pools: Pools, tmp_path: Path, world: int, flags: str):
    argv = [*LEAN, *"--no-save --ema-decay 0.8 --lr 1e-2 --lr-warmup-iters 0".split()]
    ours = pools(world).run(losses_of_averages, [*argv, *flags.split()], str(tmp_path / "many"))
    (theirs,) = pools(1).run(losses_of_averages, argv, str(tmp_path / "one"))
    assert abs(theirs[0] - theirs[1]) > 1e-3  # averages are other weights
    assert theirs[2] == pytest.approx(theirs[1], rel=1e-6)  # after the evaluation, weights are back
    for each in ours:
        assert each == pytest.approx(theirs, rel=1e-5)


def test_averages_are_exported_apart(pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = hf.save(FAMILIES["llava"][0](), tmp_path / "hf")
    argv = "--seq-length 48 --gbs 2 --lr 1e-2 --train-iters 2 --no-tensorboard --freeze vision --ema-decay 0.5".split()
    argv += ["--init-from", str(folder), "--image-sizes", square("llava")]
    pools(2).run(train_composed, [*argv, "--tp", "2"], str(tmp_path / "run"))
    checkpoint = folders.newest(tmp_path / "run/checkpoints")
    averages, plain = TrainedReader(checkpoint, averaged=True), CheckpointReader(checkpoint)
    for key, moved in (("output.linear.weight", True), ("patch_embed.proj.weight", False)):
        rows = plain.stored[key].shape[0]
        ours, theirs = averages.read(key, 0, rows), plain.read(key, 0, rows)
        assert torch.equal(ours.to(theirs.dtype), theirs) is not moved
    for flags in ([], ["--ema"]):
        assert convert.main(["export", *flags, str(tmp_path / "run"), str(tmp_path / f"out{len(flags)}")]) == 0
    sizes = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("out0", "out1")]
    assert len(sizes[0]) == len(sizes[1])
    assert sizes[0] != sizes[1]
    argv[argv.index("--ema-decay") + 1] = "0"
    pools(1).run(train_composed, argv, str(tmp_path / "without"))
    assert convert.main(["export", "--ema", str(tmp_path / "without"), str(tmp_path / "out2")]) == 2
    assert "has no averaged weights: leave --ema out" in capsys.readouterr().err


BF16 = "--precision bf16 --seq-length 48 --gbs 2 --lr 1e-2 --lr-warmup-iters 0 --train-iters 2 --no-tensorboard".split()
TRAINED = "--freeze vision".split()
LORA = "--freeze vision projector --lora-rank 2 --lora-targets language --lora-alpha 8".split()
# What has tensors of several types in one weight of megavlm, too: the first language layer's queries, keys and values.
MIXED = {"vision": torch.float16, "language": torch.bfloat16, "projector": torch.float32, "q_proj": torch.float32}


def mixed(path: Path) -> Path:
    folder = hf.save(FAMILIES["llava"][0](), path)
    weights = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        weights[name] = value.to([each for part, each in MIXED.items() if part in name][-1])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_exports_keep_types_and_what_was_not_trained(pools: Pools, tmp_path: Path) -> None:
    folder = mixed(tmp_path / "hf")
    begun = load_file(folder / "model.safetensors")
    argv = [*BF16, "--image-sizes", square("llava"), "--init-from", str(folder)]
    pools(1).run(train_composed, [*argv, *TRAINED], str(tmp_path / "trained"))
    pools(1).run(train_composed, [*argv, *LORA], str(tmp_path / "adapted"))

    def written(command: str, run: str) -> dict[str, Tensor]:
        out = tmp_path / f"{run}-{command}"
        assert convert.main([command, str(tmp_path / run), str(out)]) == 0
        if command != "export-lora":
            assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
        (file,) = out.glob("*.safetensors")
        return load_file(file)

    trained = written("export", "trained")
    main = CheckpointReader(folders.resolve(tmp_path / "trained"))
    key = "embedding.word_embeddings.weight"
    rows = begun["language_model.model.embed_tokens.weight"].shape[0]
    moved = main.read(f"optimizer.state.param.{key}", 0, rows)
    assert not torch.equal(moved.bfloat16().float(), moved), "main weights hold more than bf16 does"
    assert torch.equal(
        trained["language_model.model.embed_tokens.weight"],
        moved.to(begun["language_model.model.embed_tokens.weight"].dtype),
    )
    assert_alike(trained, begun, frozen=("vision",))
    assert convert.main(["verify", str(tmp_path / "trained-export"), str(tmp_path / "trained")]) == 0

    merged, adapters = written("merge-lora", "adapted"), written("export-lora", "adapted")
    factors = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in adapters}
    assert_alike(merged, begun, frozen=("vision", "projector", "embed_tokens", "norm", "lm_head"))
    for module in factors:
        a, b = (adapters[f"base_model.model.{module}.lora_{each}.weight"] for each in "AB")
        name = f"{module.replace('model.language_model', 'language_model.model')}.weight"
        right = (begun[name].float() + 4 * b @ a).to(begun[name].dtype)
        torch.testing.assert_close(merged[name], right, rtol=torch.finfo(right.dtype).eps, atol=1e-8)
        assert not torch.equal(merged[name], begun[name])


def assert_alike(exported: dict[str, Tensor], begun: dict[str, Tensor], *, frozen: tuple[str, ...]) -> None:
    """Check names and types, and that tensors with one of these words in their names are as they were, others not."""
    assert {name: each.dtype for name, each in exported.items()} == {name: each.dtype for name, each in begun.items()}
    same = {name for name in begun if torch.equal(exported[name], begun[name])}
    assert same == {name for name in begun if any(word in name for word in frozen)}
