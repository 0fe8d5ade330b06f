"""A model and a packed micro-batch, and what one step makes of them: on whatever device this process has.

Run as a program (`python -m tests.gpu.model FILE FLAGS…`) it writes the same to a file: with CUDA_VISIBLE_DEVICES= that
is the fp32 reference on a CPU, which cannot be computed in a process that uses the GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]

# Widths that tensor cores and fused attention take (heads of 64), images of two sizes and none, grouped queries.
_FLAGS = (
    "--global-batch-size 1 --micro-batch-size 1 --seq-length 512 --no-tensorboard --data synthetic --lr 1e-3 "
    "--init-method-std 0.05 --set model.vision.num_layers=3 model.vision.hidden_size=128 "
    "model.vision.ffn_hidden_size=256 model.vision.num_attention_heads=2 model.vision.image_size=64 "
    "model.vision.patch_size=8 model.projector.pixel_shuffle=2 model.language.num_layers=4 "
    "model.language.hidden_size=256 model.language.ffn_hidden_size=512 model.language.num_attention_heads=4 "
    "model.language.num_query_groups=2 model.language.vocab_size=512 --images-per-sample 1 2 0 --image-sizes 64 96 32"
)
MODEL = _FLAGS.split()
# bf16 rounds to 2^-9 of a value; some forty operations lie between a weight and its gradient, whose errors add up like
# a random walk: √40 · 2^-9 = 1.2 %. Twice that is allowed.
BF16 = 0.025
LENGTHS = (160, 176, 96, 80)  # of samples that share a sequence


def config_of(flags: Sequence[str]) -> Any:
    from megavlm.command_line.parsing import parse
    from megavlm.rules.check import check
    from megavlm.rules.defaults import resolve

    config = parse([*MODEL, *flags])
    check(config, world=1)
    return resolve(config)


def engine_of(config: Any, backend: Any) -> Any:
    """An engine with weights that depend on the seed and names alone."""
    from megavlm.arch.dims import dims_of
    from megavlm.arch.plan import make_plan
    from megavlm.parallel.groups import build_groups, destroy_groups
    from megavlm.train.build_engine import build_engine

    destroy_groups()
    plan = make_plan(config, dims_of(config, world=1))
    groups = build_groups(plan.dims, tied_owners=(), seed=1, timeout_minutes=2)
    vocabulary = config.model.language.vocab_size
    return build_engine(config, plan, groups, vocab_size=vocabulary, backend=backend)


def samples_of(config: Any) -> tuple[Any, list[Any]]:
    """The source and samples of `LENGTHS`."""
    from megavlm.data.synthetic import SyntheticSource

    sources = [SyntheticSource(replace(config, train=replace(config.train, seq_length=length))) for length in LENGTHS]
    return sources[0], [source.sample(index) for index, source in enumerate(sources)]


def packed_batch(config: Any) -> Any:
    """All samples in one row."""
    from megavlm.data.collate import CollateSpec, collate

    source, samples = samples_of(config)
    return collate([samples], CollateSpec.of(config, source))


def results(
    flags: Sequence[str], backend: Any, *, batches: Callable[[Any], list[Any]] | None = None
) -> dict[str, Tensor]:
    """Mean loss, logits and gradients (per trained token) of one step, on the CPU."""
    config = config_of(flags)
    engine = engine_of(config, backend)
    given = batches(config) if batches is not None else [packed_batch(config)]
    found = {f"logits {i}": part.float().cpu() for i, part in enumerate(engine.schedule.logits(given))}
    engine.optimizer.zero_grad()
    total, tokens, *_ = engine.schedule.train(given).tolist()  # losses of further tokens follow
    for name, param in engine.chunks[0].module.named_parameters():
        found[f"gradient of {name}"] = param.main_grad.float().cpu() / tokens
    found["loss"] = torch.tensor(total / tokens)
    engine.close()
    return found


def reference(flags: Sequence[str], folder: Path) -> Mapping[str, Tensor]:
    """The same in fp32 on a CPU, in a process that sees no GPU."""
    out = folder / "reference.pt"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.model", str(out), *flags]
    subprocess.run(command, cwd=ROOT, env=hidden, check=True, timeout=300)
    found: Mapping[str, Tensor] = torch.load(out, weights_only=True)
    return found


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], kind: str) -> float:
    """Root of the summed squares of all differences over that of the values, of all tensors of a kind that both have.

    A transformer layer that fuses a norm with a linear layer names the norm's weight otherwise: it is left out.
    """
    shared = [name for name in expected if name.startswith(kind) and name in found]
    assert shared, f"nothing of kind {kind!r} in both"
    off = sum(float((found[name] - expected[name]).double().square().sum()) for name in shared)
    size = sum(float(expected[name].double().square().sum()) for name in shared)
    return (off / size) ** 0.5


def near(found: Tensor, expected: Tensor) -> bool:
    """bf16 rounds the inputs of both products and the probabilities: a few roundings of 2^-9."""
    return bool((found.float() - expected).norm() < 0.01 * expected.norm())


def require_fp8(world: Any) -> None:
    """Skip where the device has no FP8 units."""
    capability = (0, 0) if world.is_cpu else torch.cuda.get_device_capability(world.device)
    if capability < (8, 9):
        pytest.skip(f"FP8 needs compute capability 8.9, this is {'a CPU' if world.is_cpu else capability}")


def main() -> None:
    from megavlm.backend import activate

    backend = activate()  # before anything imports megatron-core
    from megavlm.parallel.rendezvous import start

    start(backend, timeout_minutes=2)
    torch.save(results(sys.argv[2:], backend), sys.argv[1])


if __name__ == "__main__":
    main()
