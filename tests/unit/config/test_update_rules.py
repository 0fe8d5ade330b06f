"""What is declared of update rules."""

from __future__ import annotations

from dataclasses import replace

from megavlm.config.optimizer_schema import newton_schulz_flops
from megavlm.config.schema import OptimizerConfig


def test_flops_are_those_of_the_products() -> None:
    """Five steps of XXᵀ [m, m], its square, and its product with X, at 2 FLOPs a multiplication."""
    options = OptimizerConfig(muon_num_ns_steps=5)
    assert newton_schulz_flops(options, 3584, 18944) == 5 * (2 * 3584**2 * 18944 * 2 + 2 * 3584**3)
    one = replace(options, muon_num_ns_steps=1)
    assert newton_schulz_flops(one, 7, 3) == newton_schulz_flops(one, 3, 7) > 0
