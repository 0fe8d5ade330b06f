"""A Hugging Face folder at any layout, against Transformers: logits, every rank's part of every gradient, training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained, with_pretrained_model
from megavlm.model.weights import index_of, real_shape
from tests.support import hf
from tests.support.gates import ALL_LAYOUTS, hold
from tests.support.tiny_models import FAMILIES
from tests.support.training import started

STEPS = 5


@dataclass(frozen=True)
class Reference:
    """What Transformers computed; tensors as files: the weights, the gradients as if they were weights, the logits."""

    family: str
    folder: Path
    gradients: Path
    logits: Path
    images: Sequence[Any]  # for each micro-batch, what `tests.support.hf.batch_of` takes


def make_reference(theirs: Any, folder: Path, images: Sequence[Any]) -> Reference:
    """Run the Transformers model on micro-batches whose losses count alike (equally many trained tokens)."""
    hf.save(theirs, folder)
    config, pretrained = hf.config_for(folder), Pretrained.of(folder, *ALL_PARTS)
    batches = [hf.batch_of(config, sizes, seed=number) for number, sizes in enumerate(images)]
    logits = {}
    for number, batch in enumerate(batches):
        loss, scores = hf.loss_of(theirs, pretrained, batch, config)
        (loss / len(images)).backward()
        logits[str(number)] = scores.detach().contiguous()
    save_file(logits, folder.with_name(f"{folder.name}-logits.safetensors"))
    hf.save_gradients(theirs, folder.with_name(f"{folder.name}-gradients"))
    return Reference(
        pretrained.family.name,
        folder,
        folder.with_name(f"{folder.name}-gradients"),
        folder.with_name(f"{folder.name}-logits.safetensors"),
        images,
    )


class References:
    """Each family's reference, computed when first asked for."""

    def __init__(self, root: Callable[[str], Path]) -> None:
        """`root` makes an empty folder with a name."""
        self._root = root
        self._made: dict[str, tuple[Reference, Any]] = {}
        self._losses: dict[str, list[float]] = {}

    def __call__(self, name: str) -> Reference:
        if name not in self._made:
            build, images = FAMILIES[name]
            theirs = build()
            self._made[name] = make_reference(theirs, self._root(name) / "hf", images), theirs
        return self._made[name][0]

    def losses(self, name: str) -> list[float]:
        """Return the losses of steps of AdamW, each with all micro-batches."""
        if name not in self._losses:
            folder, (_, theirs) = self(name).folder, self._made[name]
            config, pretrained = hf.config_for(folder), Pretrained.of(folder, *ALL_PARTS)
            batches = [hf.batch_of(config, sizes, seed=number) for number, sizes in enumerate(self(name).images)]
            self._losses[name] = list(hf.losses_of(theirs, pretrained, config, [batches] * STEPS))
        return self._losses[name]


def run_at(reference: Reference, layout: str) -> Any:
    """Return a run with the folder's weights on this rank, at the layout that the flags say."""
    argv = f"--init-from {reference.folder} --seq-length {hf.LENGTH} --mbs {len(reference.images[0])} --gbs 8 --no-save"
    # None of the synthetic images.
    argv = f"{argv} --images-per-sample 0 --no-tensorboard {hf.ADAMW} {layout}"
    return started(argv.split(), str(reference.folder.with_name("run")), with_pretrained_model)


def compare(reference: Reference, layout: str, packed: bool = False) -> dict[str, float]:
    """On this rank: the largest relative difference of each gradient slice, and of the logits on the last stage.

    Each replica has its share of the micro-batches. With `packed`, the samples of a micro-batch share one row.
    """
    with run_at(reference, f"{layout} --data-parallel-sharding none") as run:
        config, engine, groups = run.config, run.engine, run.engine.groups
        vocabulary = config.model.language.vocab_size
        batches = [
            hf.batch_of(config, sizes, seed=number, packed=packed) for number, sizes in enumerate(reference.images)
        ]
        replica, replicas = groups.coords.dp, groups.dims.dp
        mine = batches[replica::replicas]
        worst: dict[str, float] = {}
        # Rows that ranks split have no whole logits: their losses and gradients tell.
        logits = engine.schedule.logits(mine) if groups.dims.cp == 1 else []
        if logits and groups.coords.pp == groups.dims.pp - 1:
            expected = load_file(reference.logits)
            for number, (batch, ours) in enumerate(zip(mine, logits, strict=True)):
                theirs = expected[str(replica + number * replicas)]
                worst[f"logits {number}"] = max(_relative(*pair) for pair in _rows(batch, ours, theirs))
        engine.optimizer.zero_grad()
        colocated = engine.schedule.colocated
        engine.schedule.train(mine if colocated is None else colocated.with_own_images(mine))
        tokens = sum(float(batch.text.loss_mask.sum()) for batch in batches)
        gradients = Pretrained.of(reference.gradients, *ALL_PARTS)
        for chunk in engine.model_chunks:
            for param in chunk.module.parameters():
                param.data = param.main_grad / tokens  # so that each shard is a slice of the gradient
            for shard in chunk.module.shards():
                real = real_shape(shard.key, tuple(shard.global_shape), config.model, vocab_size=vocabulary)
                scale = gradients.read_slice(shard.key, real, tuple(slice(0, size) for size in real)).abs().max().item()
                wanted = gradients.read_slice(shard.key, real, index_of(shard))
                worst[f"gradients {shard.key}"] = (shard.data - wanted).abs().max().item() / max(scale, 1e-6)
    return worst


def _rows(batch: Any, ours: Any, theirs: Any) -> list[tuple[Any, Any]]:
    """Return what is to be compared: whole logits, or those of each packed sample with its row of Transformers'."""
    if batch.text.cu_seqlens is None:
        return [(ours, theirs)]
    bounds = batch.text.cu_seqlens.tolist()
    samples = list(pairwise(bounds))[: len(theirs)]  # what follows is padding
    return [(ours[0, start:end], row[: end - start]) for (start, end), row in zip(samples, theirs, strict=True)]


def losses(reference: Reference, layout: str) -> list[float]:
    """Return the losses of steps with all micro-batches, each replica with its share of them."""
    with run_at(reference, layout) as run:
        engine = run.engine
        batches = [hf.batch_of(run.config, sizes, seed=number) for number, sizes in enumerate(reference.images)]
        mine = batches[engine.groups.coords.dp :: engine.groups.dims.dp]
        colocated = engine.schedule.colocated
        return [
            engine.train_step(mine if colocated is None else colocated.with_own_images(mine)).loss for _ in range(STEPS)
        ]


def assert_layout(pools: Any, reference: Reference, layout: str) -> None:
    """Logits and every gradient agree with Transformers' on all ranks of one of ALL_LAYOUTS."""
    _, world, flags = ALL_LAYOUTS[layout]
    _hold_all(pools(world).run(compare, reference, flags), reference, layout)


def assert_packed(pools: Any, reference: Reference) -> None:
    """Logits and gradients of packed samples are those that Transformers computes for each by itself."""
    _hold_all(pools(1).run(compare, reference, "", True), reference, "packed")


def _hold_all(ranks: Sequence[dict[str, float]], reference: Reference, gates: str) -> None:
    for rank, worst in enumerate(ranks):
        for what, difference in worst.items():
            hold(reference.family, f"{gates}_{what.split()[0]}", difference, f"rank {rank}, {what}")


def assert_losses(pools: Any, reference: Reference, layout: str, expected: Sequence[float]) -> None:
    """Losses of five steps at one of ALL_LAYOUTS are those of Transformers and torch's AdamW."""
    _, world, flags = ALL_LAYOUTS[layout]
    for ours in pools(world).run(losses, reference, flags):
        for step, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
            hold(reference.family, f"{layout}_losses", abs(mine - theirs) / theirs, f"step {step}")


def _relative(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())
