"""Every option of a run, as frozen dataclasses: the single source of keys, flags, defaults, ranges and help.

A field made with `option(default, help, *aliases)` becomes the YAML key `section.name` and the flag
`--kebab-case-name`; fields of the lora section have the prefix `lora-`. Names are Megatron's. Fields of the sections
that describe the shape of a model have keys but no flags (`rules/fields.py`, SHAPE), as have fields made with
`key_only`; another `flag=` names a flag where the key is unclear without its section (`data.kind` is `--data`).
`valid=` is the range of a number, `needs=` the conditions for the option's effect, and `common=` the group in which
`--help` lists it. Rules between fields are in `megavlm/rules`. A field whose default is None, but whose type excludes
None, has a plain value after `rules.defaults.resolve`, which computes its default from other fields.
"""

# ruff: noqa: F401 (others import all classes of options from here)
from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from megavlm.config.data_schema import DataConfig, DatasetConfig
from megavlm.config.experts_schema import ExpertsConfig
from megavlm.config.layout_schema import ExecutionConfig, ParallelConfig, PlacementConfig, PrecisionConfig
from megavlm.config.model_schema import (
    LanguageConfig,
    LoraConfig,
    ModelConfig,
    ObjectiveConfig,
    ProjectorConfig,
    VisionConfig,
)
from megavlm.config.monitoring_schema import EvaluationConfig, LoggingConfig, NumericsConfig
from megavlm.config.optimizer_schema import OptimizerConfig
from megavlm.config.option import (
    AT_LEAST_0,
    AT_LEAST_1,
    DATA,
    DATASETS,
    FILES,
    MODEL,
    POSITIVE,
    TRAINING,
    Count,
    Natural,
    Needs,
    NotNegative,
    Positive,
    Valid,
    key_only,
    option,
)
from megavlm.config.vision_schema import AudioConfig

# The seeds that all random generators of a run accept; numpy has the tightest bound.
SEEDS = Valid("between 0 and 2**32 − 1", lambda value: 0 <= value < 2**32)

SAVES = Needs(lambda config: config.checkpoint.save, "with --no-save", "leave --no-save out")
of_saves = partial(option, needs=SAVES)


@dataclass(frozen=True)
class TrainConfig:
    """How long a run trains, and on what batches."""

    train_iters: Count = option(None, "Optimizer steps; default: 100, or what --epochs makes.", common=TRAINING)
    epochs: Positive | None = option(
        None, "Epochs over --datasets instead of --train-iters; default: none.", common=TRAINING, needs=DATASETS
    )
    micro_batch_size: Count = option(1, "Sequences per micro-batch of a data-parallel rank.", "--mbs", common=TRAINING)
    global_batch_size: int = option(
        8,
        "Sequences per optimizer step over all ranks.",
        "--gbs",
        common=TRAINING,
        valid=Valid("from 1 to 1,048,576", lambda value: 1 <= value <= 2**20),
    )
    seq_length: Count = option(None, "Sequence length in tokens; default: 64, given weights: 8192.", common=DATA)
    seed: int = option(1234, "Random seed of weights, data order and dropout.", common=TRAINING, valid=SEEDS)


@dataclass(frozen=True)
class CheckpointConfig:
    save_interval: Natural = of_saves(
        None, "Steps between saves; default: 0 (at end), given weights: 500.", common=FILES
    )
    keep_checkpoints: Natural = of_saves(2, "Number of latest checkpoints to keep; 0: keep all.")
    keep_every: Natural = key_only(
        0, "Also keep checkpoints whose iteration is a multiple of this; 0: none of them.", needs=SAVES
    )
    keep_best: str | None = option(
        None,
        "Also keep the checkpoint with the best value of this metric at its iteration: loss, or any other number that "
        "metrics.jsonl has then, as validation/loss; default: none.",
        needs=(
            SAVES,
            Needs(
                lambda config: config.checkpoint.keep_checkpoints > 0,
                "with --keep-checkpoints 0, which keeps all",
                "set --keep-checkpoints to 1 or more",
            ),
        ),
    )
    keep_best_mode: Literal["min", "max"] = key_only(
        "min",
        "Whether the smallest or the largest value is the best one.",
        needs=Needs(
            lambda config: config.checkpoint.keep_best is not None, "without --keep-best", "add --keep-best loss"
        ),
    )
    save: bool = option(True, "Write checkpoints; --save-interval sets how often.")
    async_save: bool = of_saves(
        True, "Write checkpoints while training goes on; off: training waits until they are written."
    )
    checkpoint_dir: str | None = option(
        None,
        "Folder or URL (gs://…, s3://…) for copies of checkpoints, from which a run resumes if --run-dir has none as "
        "new; default: none.",
    )
    load: str | None = option(
        None,
        "Run folder, checkpoint or URL to continue from if --run-dir has no checkpoint; default: none.",
        common=FILES,
    )
    fallback: bool = option(
        True, "Load an older checkpoint if the newest one is damaged; off: end with an error instead."
    )
    accept_changed_data: bool = option(
        False,
        "Resume although seed, files, shuffling or packing changed: the position in the data then means other samples.",
    )
    init_from: str | None = option(None, "Whole model (folder, hub name, URL); default: none.", common=MODEL)
    vision_from: str | None = option(None, "Vision encoder (folder, hub name, URL); default: none.", common=MODEL)
    language_from: str | None = option(None, "Language model (folder, hub name, URL); default: none.", common=MODEL)
    projector_from: str | None = option(
        None, "Folder or URL of a connector, such as BLIP-2's Q-Former, for --vision-from and so on; default: none."
    )


@dataclass(frozen=True)
class RunConfig:
    """The output folder, dry runs, extensions and the number of processes of a run."""

    run_dir: str = option(
        "runs/latest", "Output folder; if it has checkpoints, the run resumes from the latest one.", common=FILES
    )
    dry_run: bool = option(False, "Print the plan and memory estimate and exit.", common=FILES)
    extension: tuple[str, ...] = option(
        (),
        "Packages that add connectors, objectives, vision inputs, data sources, callbacks or families: MODULE or "
        "the name of an entry point of each; may be repeated; default: none.",
    )
    world_size: Count | None = option(
        None, "Number of processes that --dry-run assumes; default: those started, or those of one model replica."
    )
    hang_timeout: NotNegative | None = option(
        None,
        "Seconds without progress of any rank after which the run ends, and all ranks write their stacks to RUN_DIR; "
        "0: never. Default: ten times the median step, at least 60.",
    )


@dataclass(frozen=True)
class Config:
    """All options of a run. `--print-config` prints them, RUN_DIR/config.yaml stores them, `--config` reads them."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
