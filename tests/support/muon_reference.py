"""Muon, AdamW and Lion as their papers write them, one whole weight at a time, to compare a run's steps with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor


def newton_schulz(u: Tensor, steps: int = 5) -> Tensor:
    """Jordan et al. 2024, without a transpose: XXᵀX is the same either way."""
    x = u / (u.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        cubed = x @ x.T @ x
        x = 3.4445 * x - 4.7750 * cubed + 2.0315 * (x @ x.T @ cubed)
    return x * 0.2 * max(u.shape) ** 0.5


def matrices(name: str, weight: Tensor, config: Any) -> Iterator[Tensor]:
    """Views of a weight that are one matrix each, none if it is for AdamW; `name` is a parameter's."""
    language, vision = config.model.language, config.model.vision
    if weight.dim() < 2 or any(part in name for part in ("embed", "output.", "lora", "gate_weight")):
        return
    if "linear_qkv" in name:
        heads, groups = (
            (language.num_attention_heads, language.num_query_groups)
            if name.startswith("language")
            else (vision.num_attention_heads,) * 2
        )
        each = heads // groups
        rows = weight.view(groups, each + 2, -1, weight.shape[-1])
        yield from (rows[:, :each], rows[:, each], rows[:, each + 1])
        return
    gated = name.startswith("language") or vision.activation == "swiglu"
    for one in weight if weight.dim() == 3 else (weight,):
        yield from one.chunk(2) if "linear_fc1" in name and gated and "projector" not in name else (one,)


@dataclass
class Reference:
    """The update of whole parameters in float64, from mean gradients that are not clipped."""

    config: Any
    momenta: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    averages: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def step(
        self, weights: dict[str, Tensor], gradients: dict[str, Tensor], rate: float, *, then: Callable[[], None]
    ) -> None:
        """Update weights in place; `then` may change them before they enter their averages."""
        self.steps += 1
        for name, weight in weights.items():
            decay = 0.0 if weight.dim() == 1 or name.endswith("bias") else self.config.optimizer.weight_decay
            self.averages.setdefault(name, weight.clone())
            weight -= rate * (decay * weight + self.direction(name, weight, gradients[name]))
        then()
        kept = self.config.optimizer.ema_decay
        for name, average in self.averages.items():
            average.copy_(kept * average + (1 - kept) * weights[name])

    def direction(self, name: str, weight: Tensor, g: Tensor) -> Tensor:
        options, zeros = self.config.optimizer, torch.zeros_like(g)
        m = self.momenta.get(name, zeros)
        if options.kind == "lion":
            self.momenta[name] = options.lion_beta2 * m + (1 - options.lion_beta2) * g
            return (options.lion_beta1 * m + (1 - options.lion_beta1) * g).sign()
        if options.kind == "muon" and list(matrices(name, weight, self.config)):
            self.momenta[name] = m = options.muon_momentum * m + g
            update = g + options.muon_momentum * m
            for part in matrices(name, update, self.config):
                part.copy_(newton_schulz(part.reshape(-1, part.shape[-1])).view_as(part))
            return update
        self.momenta[name] = m = options.adam_beta1 * m + (1 - options.adam_beta1) * g
        v = self.squares[name] = options.adam_beta2 * self.squares.get(name, zeros) + (1 - options.adam_beta2) * g * g
        unbiased = v / (1 - options.adam_beta2**self.steps)
        return m / (1 - options.adam_beta1**self.steps) / (unbiased.sqrt() + options.adam_eps)


def farthest_from_reference(argv: Sequence[str], run_dir: str, steps: int) -> dict[str, float]:
    """Train in float64 on this process; return how far each weight is from the reference's, at most, in units of the
    distance that it went; and so its average.
    """
    from tests.support.float64 import float64
    from tests.support.qk_clip_reference import clip, watched_logits
    from tests.support.training import started

    with float64(), started([*argv, "--clip-grad", "0", "--data-parallel-sharding", "none"], run_dir) as run:
        chunk = run.engine.chunks[0].module
        ours = {name: param for name, param in chunk.named_parameters() if param.requires_grad}
        begun = {name: param.detach().clone() for name, param in ours.items()}
        theirs, reference = {name: param.clone() for name, param in begun.items()}, Reference(run.config)
        update: Callable[..., None] = run.engine.optimizer.update

        def both(*, norm: float, tokens: float, logits: Tensor | None) -> None:
            gradients = {name: param.main_grad.clone() / tokens for name, param in ours.items()}
            clips = partial(clip, theirs, seen, run.config) if run.config.optimizer.qk_clip else lambda: None
            reference.step(theirs, gradients, run.engine.learning_rate(), then=clips)
            update(norm=norm, tokens=tokens, logits=logits)

        run.engine.optimizer.update = both
        seen = watched_logits(run)
        for _ in range(steps):
            run.engine.train_step(run.data_loader.next_step().batches)
        found = {}
        for name, param in ours.items():
            way = (theirs[name] - begun[name]).abs().max().clamp_min(1e-12)
            found[name] = float((param - theirs[name]).abs().max() / way)
            if run.config.optimizer.ema_decay:
                average = run.engine.optimizer.chained_optimizers[0].optimizer.state[param]["ema"]
                found[f"average of {name}"] = float((average - reference.averages[name]).abs().max() / way)
    return found
