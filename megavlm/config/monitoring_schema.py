"""Options of monitoring during training: validation, samples, logging, and handling of non-finite numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from megavlm.config.option import Count, Natural, Needs, Valid, data_kind, has_validation, key_only, option
from megavlm.config.registry import CallbackSections

VALIDATION = Needs(has_validation, "without validation data", "add --validation PATH or --validation-split 0.01")
ANSWERS = Needs(
    lambda config: has_validation(config) and config.evaluation.sample_interval > 0,
    "without answers",
    "add --sample-interval 100",
)


@dataclass(frozen=True)
class EvaluationConfig:
    """When the validation loss is measured and on how many samples; when the model answers validation samples."""

    eval_interval: Natural = option(
        None,
        "Steps between measurements of the loss on validation data, which is also measured at the end. 0: only then. "
        "Default: --save-interval.",
        needs=VALIDATION,
    )
    eval_iters: Count | None = option(
        None,
        "Maximum number of global batches per validation, a fair sample of the data; default: all batches.",
        needs=VALIDATION,
    )
    eval_samples: Count = key_only(
        96,
        "Digits: held-out questions of each kind.",
        needs=Needs(lambda config: data_kind(config) == "digits", "except on digits", "use --data digits"),
    )
    eval_ema: bool = key_only(
        False,
        "Validate, and answer held-out prompts, with the averaged weights; off: with the weights of the last step.",
        needs=Needs(lambda config: config.optimizer.ema_decay > 0, "without averaged weights", "add --ema-decay 0.999"),
    )
    sample_interval: Natural = option(
        0,
        "Steps between the model's answers to some validation samples, shown with the references on "
        "RUN_DIR/samples/index.html; it also answers before the first step and at the end. 0: never.",
        needs=VALIDATION,
    )
    sample_count: Count = key_only(
        8, "Number of validation samples to answer, from each data set in turn.", needs=ANSWERS
    )
    sample_max_new_tokens: Count = key_only(128, "Most tokens of an answer.", needs=ANSWERS)


PROFILE = Needs(lambda config: config.logging.profile, "without a profile", "add --profile")
of_profile = partial(option, needs=PROFILE)
TRACKER = Needs(lambda config: bool(config.logging.tracker), "without a tracker", "add --tracker wandb or mlflow")


@dataclass(frozen=True)
class LoggingConfig:
    log_interval: Count = option(1, "Steps between progress lines; metrics.jsonl records every step.")
    tensorboard: bool = option(True, "Write TensorBoard files to RUN_DIR/tensorboard.")
    tracker: tuple[Literal["wandb", "mlflow"], ...] = option(
        (),
        "Send metrics, options and samples to Weights & Biases (wandb) or MLflow (mlflow) as well; default: neither.",
    )
    tracker_project: str = option(
        "megavlm", "Project (Weights & Biases) or experiment (MLflow) of the run.", "--wandb-project", needs=TRACKER
    )
    tracker_run_name: str | None = option(
        None, "Name of the run in the trackers; default: the name of --run-dir.", "--wandb-exp-name", needs=TRACKER
    )
    callback: tuple[str, ...] = option(
        (),
        "Call your own code at each step, evaluation, save and at the end: MODULE:CLASS of each, or its name in an "
        "--extension; default: none.",
        point="callbacks",
    )
    profile: bool = option(
        False, "Profile steps with torch.profiler: write RUN_DIR/profile/rank-N.json.gz and the most expensive kernels."
    )
    profile_step_start: Natural = of_profile(10, "Profiler: number of steps that run before the trace starts.")
    profile_step_end: Count = of_profile(12, "Profiler: last step of the trace.")
    profile_ranks: tuple[Natural, ...] = of_profile((0,), "Profiler: ranks that write a trace.")
    callbacks: CallbackSections = field(default_factory=CallbackSections)


@dataclass(frozen=True)
class NumericsConfig:
    """Handling of non-finite numbers, spikes of the gradient norm, and weights that differ between ranks."""

    on_spike: Literal["skip", "rewind", "stop"] = option(
        "skip",
        "What to do after a step whose loss or gradient norm is not finite, or whose norm is a spike (--spike-factor): "
        "skip its batch; rewind, that is load the newest checkpoint's weights and skip all batches since; or stop.",
    )
    spike_factor: float = option(
        1000.0,
        "A gradient norm above this factor times the median of the last 128 steps that were not skipped is a spike; "
        "0: no spikes. The default finds corrupted numbers; 5 to 20 also finds unusual data.",
        valid=Valid("0 or greater than 1", lambda value: value == 0 or value > 1),
    )
    max_consecutive_skips: Count = key_only(
        10, "Number of skipped steps in a row at which the run ends, with exit status 3 and without a checkpoint."
    )
    iterations_to_skip: tuple[str, ...] = option(
        (), "Iterations whose batches are skipped, as numbers and ranges: 12 40-45. Default: no iteration."
    )
    check_weight_hash_across_dp_replicas_interval: Natural = key_only(
        0,
        "Steps between comparisons, by checksum, of weights that several ranks hold (data-parallel replicas; "
        "tensor-parallel ranks for unsplit weights); a difference ends the run with exit status 71 and "
        "names the rank. 0: no comparison.",
    )
