"""What is declared of update rules."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from megavlm.config.optimizer_schema import RULES, newton_schulz_flops
from megavlm.config.schema import Config, OptimizerConfig
from megavlm.rules.check import idle


@pytest.mark.parametrize("kind", RULES)
def test_options_of_other_rules_have_no_effect(kind: str) -> None:
    """An option is accepted with a rule that reads it, and has no effect with any other."""
    names = {field.name for rule in RULES.values() for field in fields(rule.options)}
    changed = {name: 0.5 for name in names}
    config = replace(Config(), optimizer=replace(Config().optimizer, kind=kind, **changed))  # type: ignore[arg-type]
    found = {option.path[-1]: effect for option, effect in idle(config) if option.path[-1] in names}
    assert found.keys() == names - RULES[kind].reads
    for name, effect in found.items():
        owner = next(rule for rule in RULES.values() if name in {field.name for field in fields(rule.options)})
        assert owner.name in f"{effect.lacking} {effect.remedy}"


def test_flops_are_those_of_the_products() -> None:
    """Five steps of XXᵀ [m, m], its square, and its product with X, at 2 FLOPs a multiplication."""
    options = OptimizerConfig(muon_num_ns_steps=5)
    assert newton_schulz_flops(options, 3584, 18944) == 5 * (2 * 3584**2 * 18944 * 2 + 2 * 3584**3)
    one = replace(options, muon_num_ns_steps=1)
    assert newton_schulz_flops(one, 7, 3) == newton_schulz_flops(one, 3, 7) > 0
