"""Rules about adapters and frozen parts, the objective, the update rule, the learning rate and its schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megavlm.config.derived import moments_folder
from megavlm.config.lora_config import (
    adapted_parts,
    adapts_experts,
    clipped_parts,
    frozen_parts,
    parts_of,
    trained_whole,
    unmatched,
)
from megavlm.config.model_schema import PREFERENCES
from megavlm.config.optimizer_schema import RULES
from megavlm.config.option import data_kind
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.rules import Rule, first
from megavlm.rules.defaults import is_set, resolve

_ELEMENTWISE = ", or ".join(rule.name for rule in RULES.values() if rule.others is None)


def with_train_iters(config: Config, iterations: int) -> Config:
    """Return the resolved configuration of a run of `--epochs` with its number of steps and dependent defaults.

    Raises UserError if the learning rate schedule or the profile does not fit into the number of steps.
    """
    config = resolve(replace(config, train=replace(config.train, train_iters=iterations)))
    if complaint := first((learning_rate_schedule, profile_sees_iterations), config):
        raise UserError(f"--epochs {config.train.epochs:g} makes {iterations} iterations: {complaint}")
    return config


def adapters(config: Config) -> Iterator[str]:
    """Check LoRA: targets must match linear layers of parts that are not frozen. Adapters of routed experts support no
    dropout, because PEFT adds B·A to the weights of all experts.
    """
    lora = config.lora
    if not lora.rank:
        return
    if not lora.targets:
        yield "--lora-targets is empty: name layers, for example --lora-targets language, or set --lora-rank 0"
    for name in unmatched(config):
        if "," in name:
            yield f"--lora-targets {name} is one name: write spaces between names"
        yield f"--lora-targets {name} matches no linear layer: try language, vision, q_proj or language.layers.*.q_proj"
    if lora.dropout and adapts_experts(config):
        yield (
            f"--lora-dropout {lora.dropout} cannot be combined with adapters of routed experts, for which PEFT has "
            "none: set it to 0, or remove experts from --lora-targets"
        )
    for part in adapted_parts(config):
        if part in frozen_parts(config):
            yield (
                f"--freeze {part} would freeze its adapters (--lora-targets {' '.join(lora.targets)}) as well: remove "
                f"{part} from --freeze; adapters freeze the other weights anyway"
            )


def something_trains(config: Config) -> Iterator[str]:
    if others := [part for part in config.model.freeze or () if part not in parts_of(config)]:
        yield f"--freeze {' '.join(others)} names parts that the model lacks: leave them out"
    if {*parts_of(config)} <= {*frozen_parts(config)}:
        yield f"--freeze {' '.join(parts_of(config))} leaves nothing to train: remove one of them"


def embeddings(config: Config) -> Iterator[str]:
    """Check objectives of embeddings. A gradient cache runs two forward passes, between which Transformer Engine
    updates delayed FP8 scales.
    """
    objective, hidden, interval = config.model.objective, config.model.language.hidden_size, config.evaluation
    if objective.kind in ("next-token", *PREFERENCES):
        return
    for width in objective.matryoshka_widths:
        if width >= hidden:
            yield (
                f"model.objective.matryoshka_widths {width} is not below model.language.hidden_size {hidden}, which "
                "has a loss anyway: leave it out, or lower it"
            )
    if config.precision.fp8 != "none" and config.precision.fp8_recipe == "delayed":
        yield (
            f"--objective {objective.kind} runs each micro-batch twice, with other scales in --fp8-recipe delayed: use "
            "--fp8-recipe tensorwise"
        )
    if interval.sample_interval:
        yield (
            f"--sample-interval {interval.sample_interval} lets the model answer, but with --objective "
            f"{objective.kind} it has no vocabulary: leave it out"
        )


def preferences(config: Config) -> Iterator[str]:
    """Check objectives of preferences: they need data files of answers, and support no options of token losses."""
    kind = config.model.objective.kind
    if kind not in PREFERENCES:
        return
    what = "rated answers" if kind == "kto" else "pairs of answers"
    if data_kind(config) != "files":
        yield f"--objective {kind} reads {what}: name data sets of them with --datasets"
    if config.model.language.mtp_layers:
        yield (
            f"model.language.mtp_layers {config.model.language.mtp_layers} are trained on tokens, and --objective "
            f"{kind} on answers: set it to 0"
        )
    if config.evaluation.sample_interval:
        yield (
            f"--sample-interval {config.evaluation.sample_interval} takes prompts of conversations, and --objective "
            f"{kind} has {what}: leave it out"
        )
    for name, usual in (("augment_crop", 1.0), ("augment_color", 0.0)):
        if (value := getattr(config.data, name)) != usual:
            yield (
                f"data.{name} {value} changes each image of a record apart, and --objective {kind} compares answers, "
                "also of the reference model, about the same image: leave it out"
            )


def update_rule(config: Config) -> Iterator[str]:
    """Check that the update rule has parameters to train."""
    optimizer, rule = config.optimizer, config.optimizer.rule
    if rule.others is not None and not (trained_whole(config) or config.lora.train_router):
        yield (
            f"--optimizer {rule.name} has no matrices to train: adapters are left to {rule.others.name}, and all "
            f"else is frozen; use --optimizer {_ELEMENTWISE}"
        )
    if rule.others is not None and moments_folder(config) is not None:
        yield (
            f"--offload optimizer=nvme:DIR keeps the state of elementwise updates, and --optimizer {rule.name} updates "
            f"whole matrices: use --offload optimizer, or --optimizer {_ELEMENTWISE}"
        )
    if optimizer.qk_clip and not clipped_parts(config):
        yield (
            "--qk-clip has nothing to scale: projections of queries and keys are frozen here, have adapters, or are "
            "followed by a norm of queries and keys, which bounds the logits itself; leave it out"
        )


def one_length(config: Config) -> Iterator[str]:
    """Refuse two options that set the same length, a minimum learning rate above --lr (minimum rates of parts are
    scaled with their peak rates), and a minimum loss scale above the initial one.
    """
    train, optimizer = config.train, config.optimizer
    if train.epochs is not None and is_set(train, "train_iters"):
        yield (
            f"--epochs {train.epochs:g} and --train-iters {train.train_iters} both say how long to train: leave one of "
            "them out"
        )
    if optimizer.lr_warmup_fraction is not None and optimizer.lr_warmup_iters:
        yield (
            f"--lr-warmup-fraction {optimizer.lr_warmup_fraction} and --lr-warmup-iters {optimizer.lr_warmup_iters} "
            "both say how long to warm up: leave one of them out"
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}: lower --min-lr or raise --lr"
    if optimizer.min_loss_scale > optimizer.initial_loss_scale:
        yield (
            f"optimizer.min_loss_scale {optimizer.min_loss_scale} is above optimizer.initial_loss_scale "
            f"{optimizer.initial_loss_scale}: lower the one or raise the other"
        )


def learning_rate_schedule(config: Config) -> Iterator[str]:
    """Check that warm-up and decay fit into the run; with --epochs, only once the samples have been counted."""
    run = resolve(config)
    optimizer, iterations = run.optimizer, run.train.train_iters
    if not is_set(optimizer, "lr_decay_iters"):
        return
    warmup, end = optimizer.lr_warmup_iters, optimizer.lr_decay_iters
    flag = "--lr-decay-iters" if is_set(config.optimizer, "lr_decay_iters") else "--train-iters"
    if iterations is not None and warmup > iterations:
        yield (
            f"--lr-warmup-iters {warmup} is longer than --train-iters {iterations}: shorten the warm-up or train longer"
        )
    if warmup >= end and optimizer.lr_decay_style != "constant":
        yield f"--lr-warmup-iters {warmup} leaves nothing to decay before {flag} {end}: use at most {end - 1}"
    if optimizer.lr_decay_style == "WSD" and warmup + optimizer.lr_wsd_decay_iters > end:
        yield (
            f"--lr-warmup-iters {warmup} + --lr-wsd-decay-iters {optimizer.lr_wsd_decay_iters} do not fit into {flag} "
            f"{end}: set --lr-wsd-decay-iters to at most {end - warmup}"
        )


def profile_sees_iterations(config: Config) -> Iterator[str]:
    logging = config.logging
    if not logging.profile:
        return
    start, end, last = logging.profile_step_start, logging.profile_step_end, resolve(config).train.train_iters
    if start >= end:
        yield f"--profile-step-start {start} is not before --profile-step-end {end}: use at most {end - 1}"
    if last is not None and start >= last:
        yield f"--profile-step-start {start} is not less than --train-iters {last}: use at most {last - 1}"


TRAINING_RULES: tuple[Rule, ...] = (
    adapters,
    something_trains,
    embeddings,
    preferences,
    one_length,
    learning_rate_schedule,
    update_rule,
    profile_sees_iterations,
)
