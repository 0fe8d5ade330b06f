"""A Hugging Face folder at any layout: every rank's slice of every gradient, and the logits, against Transformers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOLERANCES = {"logits": 1e-4, "gradient": 1e-3}


@dataclass(frozen=True)
class Reference:
    """What Transformers computed, as files: the weights, the gradients as if they were weights, and the logits."""

    folder: Path
    gradients: Path
    logits: Path
    images: Sequence[Any]  # for each micro-batch, what `tests.support.hf.batch_of` takes


def make_reference(theirs: Any, folder: Path, images: Sequence[Any]) -> Reference:
    """Run the Transformers model on micro-batches whose losses count alike (equally many trained tokens)."""
    from safetensors.torch import save_file

    from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained
    from tests.support import hf

    hf.save(theirs, folder)
    config, pretrained = hf.config_for(folder), Pretrained.of(folder, *ALL_PARTS)
    logits = {}
    for number, sizes in enumerate(images):
        loss, scores = hf.loss_of(theirs, pretrained, hf.batch_of(config, sizes, seed=number), config)
        (loss / len(images)).backward()
        logits[str(number)] = scores.detach().contiguous()
    save_file(logits, folder.with_name(f"{folder.name}-logits.safetensors"))
    hf.save_gradients(theirs, folder.with_name(f"{folder.name}-gradients"))
    return Reference(
        folder,
        folder.with_name(f"{folder.name}-gradients"),
        folder.with_name(f"{folder.name}-logits.safetensors"),
        images,
    )


def compare(reference: Reference, layout: str) -> dict[str, float]:
    """On this rank: the largest relative difference of each gradient slice, and of the logits on the last stage."""
    from safetensors.torch import load_file
    from torch import distributed as dist

    from megavlm import backend
    from megavlm.checkpoint.hf.load import load_weights
    from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained, with_pretrained_model
    from megavlm.config.cli import parse
    from megavlm.config.resolve import resolve
    from megavlm.config.rules import check
    from megavlm.model.weights import index_of, named_shards, real_shape
    from megavlm.parallel.dims import dims_of
    from megavlm.parallel.groups import build_groups, destroy_groups
    from megavlm.planner.plan import make_plan
    from megavlm.train.build_engine import build_engine
    from tests.support import hf

    argv = f"--init-from {reference.folder} --seq-length {hf.LENGTH} --mbs {len(reference.images[0])} --gbs 8 {layout}"
    argv += " --precision fp32 --data-parallel-sharding none --images-per-sample 0"  # none of the synthetic images
    config = with_pretrained_model(parse(shlex.split(argv)))
    check(config, world=dist.get_world_size())
    config = resolve(config)
    destroy_groups()
    plan = make_plan(config, dims_of(config, world=dist.get_world_size()))
    tied = (plan.embedding_owner, plan.output_owner) if config.model.language.tie_embeddings else ()
    groups = build_groups(plan.dims, tied_owners=tied, seed=1, timeout_minutes=30)
    vocabulary = config.model.language.vocab_size or 0

    def fill(chunks: Any) -> None:
        load_weights(chunks, [Pretrained.of(reference.folder, *ALL_PARTS)], config, vocab_size=vocabulary)

    engine = build_engine(config, plan, groups, vocab_size=vocabulary, backend=backend.activate(), weights=fill)
    batches = [hf.batch_of(config, sizes, seed=number) for number, sizes in enumerate(reference.images)]
    worst: dict[str, float] = {}
    logits = engine.schedule.logits(batches)
    if groups.coords.pp == plan.dims.pp - 1:
        expected = load_file(reference.logits)
        for number, ours in enumerate(logits):
            worst[f"logits {number}"] = _relative(ours, expected[str(number)])
    engine.optimizer.zero_grad()
    colocated = engine.schedule.colocated
    engine.schedule.train(batches if colocated is None else colocated.with_own_images(batches))
    tokens = plan.dims.dp * sum(float(batch.text.loss_mask.sum()) for batch in batches)
    gradients = Pretrained.of(reference.gradients, *ALL_PARTS)
    for chunk in engine.model_chunks:
        for param in chunk.module.parameters():
            param.data = param.main_grad / tokens  # so that each shard is a slice of the gradient
        for shard in named_shards(chunk.module):
            real = real_shape(shard.key, tuple(shard.global_shape), config.model, vocab_size=vocabulary)
            scale = gradients.read_slice(shard.key, real, tuple(slice(0, size) for size in real)).abs().max().item()
            wanted = gradients.read_slice(shard.key, real, index_of(shard))
            worst[f"gradient {shard.key}"] = (shard.data - wanted).abs().max().item() / max(scale, 1e-6)
    return worst


def assert_layout(pools: Any, world: int, reference: Reference, layout: str) -> None:
    """Logits and every gradient agree with Transformers' on all ranks."""
    for rank, worst in enumerate(pools(world).run(compare, reference, layout)):
        for what, difference in worst.items():
            assert difference < TOLERANCES[what.split()[0]], f"rank {rank}, {what}: {difference:.1e}"


def _relative(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())
