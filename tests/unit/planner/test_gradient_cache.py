"""What the planner knows of embedding training: one forward pass more, and no vocabulary."""

from __future__ import annotations

import pytest

from megavlm.arch.kinds import layer_cost, layer_flops, local_parameters, step_flops
from megavlm.arch.layers import OUTPUT, layer_names
from megavlm.arch.workload import typical_workload
from tests.support.flags import resolved

SIZES = "--set model.language.vocab_size=1000"


def test_flops_have_one_forward_pass_more_and_no_logits() -> None:
    plain, cached = (resolved(f"{SIZES} {flags}".split()) for flags in ("", "--objective contrastive"))
    work = typical_workload(plain)
    ahead = sum(layer_cost(name, cached.model, work).forward_flops for name in layer_names(plain.model))
    logits = layer_flops(plain, work)[OUTPUT]
    assert step_flops(cached, work) == pytest.approx(step_flops(plain, work) - logits + ahead)
    assert layer_flops(cached, work)[OUTPUT] == 0


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--objective contrastive", 0),
        ("--objective contrastive --set model.objective.learn_temperature=true", 1),
        ("--objective sigmoid", 2),
        ("--objective sigmoid --set model.objective.learn_temperature=false", 0),
    ],
)
def test_the_output_layer_has_the_scalars_of_the_loss_alone(flags: str, count: int) -> None:
    assert local_parameters(OUTPUT, resolved(f"{SIZES} {flags}".split()).model, 2) == count
