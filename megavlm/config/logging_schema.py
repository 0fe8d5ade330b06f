"""Options about what a run tells others while it trains; `schema.py` defines how options are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megavlm.config.option import AT_LEAST_0, AT_LEAST_1, Needs, option
from megavlm.config.registry import CallbackSections

PROFILE = Needs(lambda config: config.logging.profile, "without a profile", "add --profile")
TRACKER = Needs(lambda config: bool(config.logging.tracker), "without a tracker", "add --tracker wandb or mlflow")


@dataclass(frozen=True)
class LoggingConfig:
    log_interval: int = option(1, "Steps between progress lines; metrics.jsonl records every step.", valid=AT_LEAST_1)
    tensorboard: bool = option(True, "Write TensorBoard files to RUN_DIR/tensorboard.")
    tracker: tuple[Literal["wandb", "mlflow"], ...] = option(
        (),
        "Send metrics, options and samples to Weights & Biases (wandb) or MLflow (mlflow) as well; default: neither.",
    )
    tracker_project: str = option(
        "megavlm", "Project (Weights & Biases) or experiment (MLflow) of the run.", "--wandb-project", needs=TRACKER
    )
    tracker_run_name: str | None = option(
        None, "Name of the run in the trackers; default: that of --run-dir.", "--wandb-exp-name", needs=TRACKER
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
    profile_step_start: int = option(
        10, "Profiler: number of steps that run before the trace starts.", valid=AT_LEAST_0, needs=PROFILE
    )
    profile_step_end: int = option(12, "Profiler: last step of the trace.", valid=AT_LEAST_1, needs=PROFILE)
    profile_ranks: tuple[int, ...] = option(
        (0,), "Profiler: ranks that write a trace.", valid=AT_LEAST_0, needs=PROFILE
    )
    callbacks: CallbackSections = field(default_factory=CallbackSections)
