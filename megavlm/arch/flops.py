"""Floating-point operations of a training step: the one formula for plans, throughput and MFU.

A matrix product of an [n, k] weight with t tokens takes 2·n·k·t operations. Attention over a sequence of l tokens takes
2·l²·d for the scores and as much for the values (d = heads × head width), half of it where attention is causal.
The backward pass takes as much again for the gradient of the weight (if it is trained) and for the gradient of the
input (if anything before is trained): 2, 4 or 6 operations per parameter and token, by what actually runs.
"""

from __future__ import annotations

from megavlm.arch.kinds import layer_cost
from megavlm.arch.layers import encoder_names, layer_names, trained_below, trained_layers, trains_weights
from megavlm.arch.objectives import objective_of
from megavlm.arch.workload import Workload, typical_workload
from megavlm.config.schema import Config


def step_flops(config: Config, work: Workload) -> float:
    """Return the FLOPs of one training step over a workload, backward included, frozen layers counted as they run.

    Not counted are the adapters' own products (LoRA), a share of about rank / width, and the gradients between the
    matrices of the first trained layer.
    """
    return sum(layer_flops(config, work).values())


def forward_share(config: Config) -> float:
    """Return the share of a training step's FLOPs that a forward pass over the same data takes, at the typical
    workload: a third if everything is trained.
    """
    work = typical_workload(config)
    forward = sum(layer_cost(name, config.model, work).forward_flops for name in layer_names(config.model))
    return forward / step_flops(config, work)


def layer_flops(config: Config, work: Workload) -> dict[str, float]:
    """Return each layer's FLOPs of one training step: those of its forward passes (two with a gradient cache), once
    more if its own weights are trained, and once more if anything before it is.
    """
    names, trained = layer_names(config.model), trained_layers(config)
    once = set(encoder_names(config.model)) if config.placement.encoder == "colocated" else set[str]()
    passes = objective_of(config.model).forward_passes

    def products(place: int, name: str) -> int:
        forward = 1 if name in once else passes
        return forward + trains_weights(name, config) + trained_below(name, names[:place], trained)

    return {
        name: products(place, name) * layer_cost(name, config.model, work).forward_flops
        for place, name in enumerate(names)
    }
