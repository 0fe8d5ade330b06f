"""The update rules of `--optimizer`: what the configuration, the planner and checkpoints know of each. No torch.

An update rule is either elementwise, so that a rank updates whatever parts of parameters it holds, or it treats a
matrix between hidden states as a whole and leaves all other parameters to an elementwise rule. `optim/rules.py` has the
computation of each. Where its state is (device, host, disk) and who holds which part of it are no affair of a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from megavlm.config.option import AT_LEAST_1, BELOW_1, KEY_ONLY, POSITIVE, TRAINING, option


@dataclass(frozen=True)
class MatrixCost:
    """What an update of whole matrices takes, given the options of a run.

    Args:
        flops: FLOPs for a matrix of so many rows and columns.
        number_bytes: bytes of a number in it, and of what ranks send for it.
    """

    flops: Callable[[Any, int, int], float]
    number_bytes: Callable[[Any], int]


@dataclass(frozen=True)
class UpdateRule:
    """An update rule.

    Args:
        name: what `--optimizer` calls it.
        options: a dataclass of the options that it alone has, a base of `RuleOptions`.
        state: names of the fp32 numbers that it keeps of each parameter, in checkpoints too.
        others: the elementwise rule of all parameters but matrices; None: this rule is elementwise.
        matrix_cost: what the update of matrices takes; None for an elementwise rule.
        defaults: options whose default follows from `--precision`.
        elsewhere: what other programs call it.
    """

    name: str
    options: type
    state: tuple[str, ...]
    others: UpdateRule | None = None
    matrix_cost: MatrixCost | None = None
    defaults: Callable[[str], Mapping[str, Any]] = lambda precision: {}
    elsewhere: str = ""

    @property
    def elementwise(self) -> UpdateRule:
        """Return the rule by which parameters are updated that are not matrices."""
        return self.others or self

    @property
    def reads(self) -> frozenset[str]:
        """Return the names of all options that it heeds."""
        own = frozenset(field.name for field in fields(self.options))
        return own if self.others is None else own | self.others.reads


@dataclass(frozen=True)
class AdamWOptions:
    """The options of AdamW."""

    adam_beta1: float = option(0.9, "Decay rate of Adam's first moment.", valid=BELOW_1)
    adam_beta2: float = option(0.95, "Decay rate of Adam's second moment.", valid=BELOW_1)
    adam_eps: float = option(1e-8, "Epsilon of AdamW.", valid=POSITIVE)


@dataclass(frozen=True)
class MuonOptions:
    """The options of Muon."""

    muon_momentum: float = option(0.95, "Muon: decay rate of the momentum.", flag=KEY_ONLY, valid=BELOW_1)
    muon_num_ns_steps: int = option(
        5, "Muon: number of Newton-Schulz steps that make an update orthogonal.", flag=KEY_ONLY, valid=AT_LEAST_1
    )
    muon_precision: Literal["fp32", "bf16"] = option(
        None,
        "Muon: type in which ranks compute Newton-Schulz steps and send each other what these need; default: fp32 with "
        "--precision fp32, else bf16.",
        flag=KEY_ONLY,
    )


@dataclass(frozen=True)
class LionOptions:
    """The options of Lion."""

    lion_beta1: float = option(
        0.9, "Lion: weight of the momentum in the interpolation whose sign is the update.", flag=KEY_ONLY, valid=BELOW_1
    )
    lion_beta2: float = option(0.99, "Lion: decay rate of the momentum.", flag=KEY_ONLY, valid=BELOW_1)


@dataclass(frozen=True)
class _Choice:
    kind: Literal["adamw", "muon", "lion"] = option("adamw", "Update rule.", flag="--optimizer", common=TRAINING)


@dataclass(frozen=True)
class RuleOptions(LionOptions, MuonOptions, AdamWOptions, _Choice):
    """The choice of an update rule and the options of all of them; fields of the last base come first."""

    @property
    def rule(self) -> UpdateRule:
        """Return the update rule of the run."""
        return RULES[self.kind]


def newton_schulz_flops(options: MuonOptions, rows: int, columns: int) -> float:
    """Return the FLOPs of Newton-Schulz steps on a matrix m × n, m ≤ n: XXᵀ, its square, and the product with X."""
    m, n = sorted((rows, columns))
    return options.muon_num_ns_steps * (4.0 * m * m * n + 2.0 * m**3)


ADAMW = UpdateRule(
    "adamw", AdamWOptions, ("exp_avg", "exp_avg_sq"), elsewhere="adam adamw-torch adamw-torch-fused adamw-hf"
)
MUON = UpdateRule(
    "muon",
    MuonOptions,
    ("momentum",),
    others=ADAMW,
    matrix_cost=MatrixCost(newton_schulz_flops, lambda options: 4 if options.muon_precision == "fp32" else 2),
    defaults=lambda precision: {"muon_precision": "fp32" if precision == "fp32" else "bf16"},
)
LION = UpdateRule("lion", LionOptions, ("exp_avg",))

RULES: Mapping[str, UpdateRule] = {rule.name: rule for rule in (ADAMW, MUON, LION)}
assert tuple(RULES) == get_args(get_type_hints(_Choice)["kind"]), "`--optimizer` names the rules that there are"


def one_of(chosen: Callable[[UpdateRule], bool]) -> str:
    """Return the names of the rules of which `chosen` is true, as a message lists them: "adamw, or lion"."""
    return ", or ".join(rule.name for rule in RULES.values() if chosen(rule))


def idle_options(rule: UpdateRule) -> Iterator[tuple[frozenset[str], str, str]]:
    """Yield the names of options without effect under a rule, what is lacking, and the remedy, as messages say it."""
    for other in RULES.values():
        own = frozenset(field.name for field in fields(other.options))
        if own & rule.reads:
            continue
        readers = one_of(lambda each, own=own: bool(own & each.reads))  # type: ignore[misc]
        if readers == other.name:
            yield own, f"without --optimizer {other.name}", "add it"
        else:
            yield own, f"with --optimizer {rule.name}", f"use --optimizer {readers}"
