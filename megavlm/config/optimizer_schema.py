"""Options of the optimizer and of the learning rate. `schema.py` says how options are declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megavlm.config.option import TRAINING, option
from megavlm.config.update_rules import RuleOptions


@dataclass(frozen=True)
class OptimizerConfig(RuleOptions):
    """The update rule, learning rates and their schedule, clipping, and the loss scale of fp16."""

    lr: float = option(
        None,
        "Peak learning rate; default: 1e-3, from given weights 1e-5.",
        common=TRAINING,
    )
    min_lr: float = option(0.0, "Learning rate after the end of the decay.")
    vision_lr: float | None = option(
        None, "Peak learning rate of the vision encoder; default: --lr, or 2e-6 from given weights without --lr."
    )
    projector_lr: float | None = option(
        None,
        "Peak learning rate of the projector; default: --lr, or without --lr 2e-5 beside LoRA and 1e-3 for a new one.",
    )
    language_lr: float | None = option(
        None, "Peak learning rate of the language model; default: --lr, or without --lr 2e-5 beside LoRA."
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = option(
        "cosine", "Shape of the decay after the warm-up.", common=TRAINING
    )
    lr_warmup_iters: int = option(
        None,
        "Steps of linear warm-up; default: 0, from given weights 3 %.",
        common=TRAINING,
    )
    lr_warmup_fraction: float | None = option(
        None, "Warm-up as a fraction of the steps before the decay ends, in place of --lr-warmup-iters; default: none."
    )
    lr_decay_iters: int = option(
        None, "Number of steps after which the learning rate has decayed to --min-lr; default: --train-iters."
    )
    lr_wsd_decay_iters: int = option(
        None, "WSD: number of steps of the final decay; default: a tenth of the steps before the decay ends."
    )
    weight_decay: float = option(0.01, "Decoupled weight decay (AdamW); not applied to norms and biases.")
    qk_clip: bool = option(
        False,
        "After each update, scale the query and key projections of heads whose largest attention logit of the step was "
        "above --qk-clip-threshold (MuonClip).",
    )
    qk_clip_threshold: float = option(100.0, "--qk-clip: largest attention logit that heads may have.")
    qk_clip_alpha: float = option(
        0.5, "--qk-clip: share of the scaling that queries take, as an exponent; keys take the rest."
    )
    ema_decay: float = option(
        0.0,
        "Decay rate of an exponential moving average of the fp32 weights, which checkpoints keep and `convert export "
        "--ema` exports; 0: no average.",
    )
    clip_grad: float = option(
        1.0, "Maximum global gradient norm; larger gradients are scaled down to it. 0: no clipping."
    )
    initial_loss_scale: float = option(4096.0, "fp16: initial loss scale, which keeps small gradients above underflow.")
    min_loss_scale: float = option(1.0, "fp16: lower bound of the loss scale.")
    loss_scale_window: int = option(1000, "fp16: number of steps without overflow after which the loss scale doubles.")
    hysteresis: int = option(
        2, "fp16: number of overflows before the loss scale is halved; each overflow skips its step."
    )
