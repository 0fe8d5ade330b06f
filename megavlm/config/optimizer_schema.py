"""Options of the optimizer, and its update rules as the configuration, planner and checkpoints use them. No torch.

An update rule is either elementwise, so that a rank updates any shard of parameters, or it updates matrices between
hidden states as a whole and leaves all other parameters to an elementwise rule. `optim/rules.py` computes the updates.
A rule does not depend on where its state is (device, host, disk) and how ranks shard it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self, get_args, get_type_hints

from megavlm.config.option import (
    TRAINING,
    VISION,
    Below1,
    Count,
    Natural,
    Needs,
    NotNegative,
    Positive,
    key_only,
    option,
)


@dataclass(frozen=True)
class MatrixCost:
    """Cost of an update of whole matrices; both functions take the options of a run.

    Args:
        flops: FLOPs for a matrix, given its rows and columns.
        number_bytes: bytes of a number during the update and on links between ranks.
    """

    flops: Callable[[Any, int, int], float]
    number_bytes: Callable[[Any], int]


@dataclass(frozen=True)
class UpdateRule:
    """An update rule of `--optimizer`.

    Args:
        name: its value of `--optimizer`.
        options: a dataclass of the rule's own options, a base of `RuleOptions`.
        state: names of the fp32 numbers that the rule keeps per parameter, also in checkpoints.
        others: the elementwise rule for all parameters but matrices; None: this rule is elementwise.
        matrix_cost: cost of the update of matrices; None for an elementwise rule.
        defaults: function of `--precision` that returns the defaults of options that depend on it.
        elsewhere: the rule's names in other programs, separated by spaces.
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
        """Return the rule that updates parameters other than matrices: the rule itself if it is elementwise."""
        return self.others or self


ADAM = Needs(lambda config: config.optimizer.kind != "lion", "with --optimizer lion", "use --optimizer adamw, or muon")
of_muon = partial(
    key_only, needs=Needs(lambda config: config.optimizer.kind == "muon", "without --optimizer muon", "add it")
)
of_lion = partial(
    key_only, needs=Needs(lambda config: config.optimizer.kind == "lion", "without --optimizer lion", "add it")
)


@dataclass(frozen=True)
class AdamWOptions:
    """The options of AdamW, which also updates Muon's parameters that are not matrices."""

    adam_beta1: Below1 = option(0.9, "Decay rate of Adam's first moment.", needs=ADAM)
    adam_beta2: Below1 = option(0.95, "Decay rate of Adam's second moment.", needs=ADAM)
    adam_eps: Positive = option(1e-8, "Epsilon of AdamW.", needs=ADAM)


@dataclass(frozen=True)
class MuonOptions:
    """The options of Muon."""

    muon_momentum: Below1 = of_muon(0.95, "Muon: decay rate of the momentum.")
    muon_num_ns_steps: Count = of_muon(5, "Muon: number of Newton-Schulz steps that make an update orthogonal.")
    muon_precision: Literal["fp32", "bf16"] = of_muon(
        None,
        "Muon: type in which ranks compute Newton-Schulz steps and exchange the matrices; default: fp32 with "
        "--precision fp32, else bf16.",
    )


@dataclass(frozen=True)
class LionOptions:
    """The options of Lion."""

    lion_beta1: Below1 = of_lion(0.9, "Lion: weight of the momentum in the interpolation whose sign is the update.")
    lion_beta2: Below1 = of_lion(0.99, "Lion: decay rate of the momentum.")


@dataclass(frozen=True)
class _Choice:
    kind: Literal["adamw", "muon", "lion"] = option("adamw", "Update rule.", flag="--optimizer", common=TRAINING)


@dataclass(frozen=True)
class RuleOptions(LionOptions, MuonOptions, AdamWOptions, _Choice):
    """The choice of an update rule and the options of all rules; fields of the last base class come first."""

    @property
    def rule(self) -> UpdateRule:
        """Return the update rule of the run."""
        return RULES[self.kind]

    def resolved(self, precision: str) -> Self:
        """Return the options with the defaults that follow from `--precision`."""
        defaults = self.rule.defaults(precision).items()
        unset = {name: value for name, value in defaults if getattr(self, name) is None}
        return replace(self, **unset) if unset else self


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


LOSS_SCALE = Needs(
    lambda config: config.precision.dtype == "fp16", "without a loss scale, which only fp16 has", "add --precision fp16"
)
QK_CLIP = Needs(lambda config: config.optimizer.qk_clip, "without --qk-clip", "add it")


@dataclass(frozen=True)
class OptimizerConfig(RuleOptions):
    """The update rule, learning rates and their schedule, clipping, and the loss scale of fp16."""

    lr: Positive = option(None, "Peak learning rate; default: 1e-3, given weights: 1e-5, LoRA: 1e-4.", common=TRAINING)
    min_lr: NotNegative = option(0.0, "Learning rate after the end of the decay.")
    vision_lr: NotNegative | None = option(
        None,
        "Peak learning rate of vision and audio encoders; default: --lr, or 2e-6 from given weights without --lr.",
        needs=VISION,
    )
    projector_lr: NotNegative | None = option(
        None,
        "Peak learning rate of the projector; default: --lr, or without --lr 2e-5 beside LoRA and 1e-3 for a new one.",
        needs=VISION,
    )
    language_lr: NotNegative | None = option(
        None, "Peak learning rate of the language model; default: --lr, or without --lr 2e-5 beside LoRA."
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = option(
        "cosine", "Shape of the decay after the warm-up.", common=TRAINING
    )
    lr_warmup_iters: Natural = option(None, "Steps of warm-up; default: 0, given weights: 3 %.", common=TRAINING)
    lr_warmup_fraction: Below1 | None = option(
        None, "Warm-up as a fraction of the steps before the decay ends, in place of --lr-warmup-iters; default: none."
    )
    lr_decay_iters: Count = option(
        None, "Number of steps after which the learning rate has decayed to --min-lr; default: --train-iters."
    )
    lr_wsd_decay_iters: Count = option(
        None,
        "WSD: number of steps of the final decay; default: a tenth of the steps before the decay ends.",
        needs=Needs(lambda config: config.optimizer.lr_decay_style == "WSD", "without WSD", "use --lr-decay-style WSD"),
    )
    weight_decay: NotNegative = option(0.01, "Decoupled weight decay (AdamW); not applied to norms and biases.")
    qk_clip: bool = option(
        False,
        "After each update, scale the query and key projections of heads whose largest attention logit of the step was "
        "above optimizer.qk_clip_threshold (MuonClip).",
    )
    qk_clip_threshold: Positive = key_only(100.0, "--qk-clip: largest attention logit.", needs=QK_CLIP)
    ema_decay: Below1 = option(
        0.0,
        "Decay rate of an exponential moving average of the fp32 weights, which checkpoints keep and `convert export "
        "--ema` exports; 0: no average.",
    )
    clip_grad: NotNegative = option(
        1.0, "Maximum global gradient norm; larger gradients are scaled down to it. 0: no clipping."
    )
    initial_loss_scale: Positive = key_only(
        4096.0, "fp16: initial loss scale, which keeps small gradients above underflow.", needs=LOSS_SCALE
    )
    min_loss_scale: Positive = key_only(1.0, "fp16: lower bound of the loss scale.", needs=LOSS_SCALE)
    loss_scale_window: Count = key_only(
        1000, "fp16: number of steps without overflow after which the loss scale doubles.", needs=LOSS_SCALE
    )
    hysteresis: Count = key_only(
        2, "fp16: number of overflows before the loss scale is halved; each overflow skips its step.", needs=LOSS_SCALE
    )
