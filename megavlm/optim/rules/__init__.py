"""The computation of each update rule, by its name; `config/update_rules.py` declares the rules without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megavlm.config.schema import OptimizerConfig
from megavlm.config.update_rules import RULES
from megavlm.optim.elementwise import ElementwiseRule
from megavlm.optim.matrices import MatrixRule
from megavlm.optim.rules.adamw import ADAMW
from megavlm.optim.rules.lion import LION
from megavlm.optim.rules.muon import Muon

ELEMENTWISE: Mapping[str, ElementwiseRule] = {"adamw": ADAMW, "lion": LION}
OF_MATRICES: Mapping[str, Callable[[OptimizerConfig], MatrixRule]] = {"muon": Muon.of}

assert {rule.name: rule.others is None for rule in RULES.values()} == {
    **dict.fromkeys(ELEMENTWISE, True),
    **dict.fromkeys(OF_MATRICES, False),
}, "each rule that is declared has a computation of its kind"
