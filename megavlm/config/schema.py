"""Every option of a run, as frozen dataclasses: the single source of keys, flags, defaults, ranges and help.

A field made with `option(default, help, *aliases)` becomes the YAML key `section.name` and the flag
`--kebab-case-name`; fields of the lora section carry that prefix. Names are Megatron's. The sections that describe the
shape of a model have keys alone (`fields.SHAPE`), as have fields with `flag=KEY_ONLY`; another `flag=` names a flag
where the key would say too little without its section (`data.kind` is `--data`). `valid=` is the range of a number,
`needs=` what must be set for the option to have an effect, and `common=` the group in which `--help` lists it. Rules
that relate fields to one another live in `rules.py`. A field whose default is None, but whose type does not have None,
is a plain value from `resolve.resolve` on, which computes its default from other fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megavlm.config.evaluation_schema import EvaluationConfig
from megavlm.config.experts_schema import ExpertsConfig
from megavlm.config.layout_schema import ExecutionConfig, ParallelConfig, PlacementConfig, PrecisionConfig
from megavlm.config.logging_schema import LoggingConfig
from megavlm.config.model_schema import LanguageConfig, LoraConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.config.needs import DATASETS, data_kind
from megavlm.config.numerics_schema import NumericsConfig
from megavlm.config.objective_schema import ObjectiveConfig
from megavlm.config.optimizer_schema import OptimizerConfig
from megavlm.config.option import (
    AT_LEAST_0,
    AT_LEAST_1,
    BELOW_1,
    DATA,
    FILES,
    FRACTION,
    KEY_ONLY,
    MODEL,
    POSITIVE,
    SHARE,
    TRAINING,
    Needs,
    Valid,
    option,
)
from megavlm.config.registry import SourceSections

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DatasetConfig",
    "EvaluationConfig",
    "ExecutionConfig",
    "ExpertsConfig",
    "LanguageConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "NumericsConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PlacementConfig",
    "PrecisionConfig",
    "ProjectorConfig",
    "RunConfig",
    "TrainConfig",
    "VisionConfig",
]

# The seeds that all random generators of a run accept; numpy has the tightest bound.
SEEDS = Valid("between 0 and 2**32 − 1", lambda value: 0 <= value < 2**32)

SYNTHETIC = Needs(lambda config: data_kind(config) == "synthetic", "except on synthetic data", "use --data synthetic")
SAVES = Needs(lambda config: config.checkpoint.save, "with --no-save", "leave --no-save out")


@dataclass(frozen=True)
class TrainConfig:
    """How long a run trains, and on what batches."""

    train_iters: int = option(
        None, "Optimizer steps; default: 100, or what --epochs makes.", common=TRAINING, valid=AT_LEAST_1
    )
    epochs: float | None = option(
        None,
        "Times to read all --datasets, not --train-iters; default: none.",
        common=TRAINING,
        valid=POSITIVE,
        needs=DATASETS,
    )
    micro_batch_size: int = option(
        1, "Sequences per micro-batch of a data-parallel rank.", "--mbs", common=TRAINING, valid=AT_LEAST_1
    )
    global_batch_size: int = option(
        8,
        "Sequences per optimizer step over all ranks.",
        "--gbs",
        common=TRAINING,
        valid=Valid("from 1 to 1,048,576", lambda value: 1 <= value <= 2**20),
    )
    seq_length: int = option(
        None, "Sequence length in tokens; default: 64, given weights: 8192.", common=DATA, valid=AT_LEAST_1
    )
    seed: int = option(1234, "Random seed of weights, data order and dropout.", common=TRAINING, valid=SEEDS)


@dataclass(frozen=True)
class DatasetConfig:
    """One data set of the user (`data.datasets`, or `--datasets PATH,weight=2,image_root=DIR …`)."""

    path: str = option(
        "", "File of records, or for webdataset the folder of tars or its meta-dataset file; or its URL."
    )
    kind: Literal["auto", "llava", "messages", "query", "alpaca", "vqa", "cauldron", "text", "pairs", "webdataset"] = (
        option("auto", "Format of a record, or webdataset for tars; auto detects it (docs/data.md).")
    )
    weight: float | None = option(
        None,
        "Sampling weight relative to the other data sets; default: its number of records, so that an epoch has each "
        "record once, or 1 beside data sets with a weight.",
    )
    image_root: str | None = option(
        None,
        "Folder, or its URL, of all image files; their paths are relative to it, or absolute and inside it. "
        "Default: the folder of the path.",
    )
    name: str | None = option(None, "Name in metrics; default: the file name.")
    columns: Mapping[str, str] | None = option(
        None, "Other names of fields, as columns=question:prompt+answer:reply, in YAML a mapping; default: none."
    )


@dataclass(frozen=True)
class DataConfig:
    kind: Literal["synthetic", "digits", "files"] = option(
        None,
        "Your files (--datasets), synthetic data, or digits (demo); default: files if --datasets is given, else "
        "synthetic.",
        flag="--data",
        common=DATA,
        point="sources",
    )
    datasets: tuple[DatasetConfig, ...] = option(
        (),
        "Data sets of --data files, as PATH[,weight=2][,kind=llava][,image_root=DIR][,name=NAME][,columns=…]; "
        "default: none.",
        common=DATA,
    )
    validation: tuple[DatasetConfig, ...] = option(
        (), "Data sets for validation; default: none.", common=DATA, needs=DATASETS
    )
    validation_split: float = option(
        0.0, "Share of --datasets held out for that.", common=DATA, valid=BELOW_1, needs=DATASETS
    )
    tokenizer: str | None = option(
        None,
        "Hugging Face tokenizer folder or SentencePiece file; default: that of --init-from or --language-from.",
        common=DATA,
        needs=DATASETS,
    )
    chat_template: str = option(
        "auto",
        "Files: name of a built-in chat template, a .jinja file, or auto (the tokenizer's, else the model family's).",
        needs=DATASETS,
    )
    train_on: Literal["assistant", "last", "all"] = option(
        "assistant",
        "Files: tokens with a loss: all assistant turns, the last assistant turn, or all tokens.",
        needs=DATASETS,
    )
    image_processor: str | None = option(
        None,
        "Files: folder with preprocessor_config.json; default: the Hugging Face model's, or with random weights one "
        "that resizes images to model.vision.image_size.",
        needs=DATASETS,
    )
    min_pixels: int | None = option(
        None,
        "Files, Qwen's models: enlarge images to at least this number of pixels; default: preprocessor_config.json's.",
        valid=AT_LEAST_1,
        needs=DATASETS,
    )
    max_pixels: int | None = option(
        None,
        "Files, Qwen's models: shrink images to at most this number of pixels, as MAX_PIXELS elsewhere (one image "
        "token is 28 × 28 or 32 × 32 pixels); default: preprocessor_config.json's.",
        valid=AT_LEAST_1,
        needs=DATASETS,
    )
    vision_input: str | None = option(
        None,
        "Files: what the vision encoder sees of an image: rgb, or array, all channels of .npy, .npz, "
        "TIFF and other files, or a name of an --extension; default: what the model was trained on, else rgb.",
        point="inputs",
        needs=DATASETS,
    )
    channel_statistics: str | None = option(
        None,
        "Files: mean and deviation of each channel, in a file that `megavlm channels` writes; default: the model's.",
        needs=DATASETS,
    )
    fast_image_resize: bool = option(
        False,
        "Files: use a faster image resize, which differs by up to 3 of 255 levels in few pixels.",
        flag=KEY_ONLY,
        needs=DATASETS,
    )
    max_image_pixels: int = option(
        2**26,
        "Files: skip samples with an image of more pixels than this, before the image is decoded.",
        valid=AT_LEAST_1,
        needs=DATASETS,
    )
    video_fps: float | None = option(
        None,
        "Files: frames that are taken of a second of a video; a record may ask for another rate; default: the model's "
        "(Qwen: 2).",
        valid=POSITIVE,
        needs=DATASETS,
    )
    video_max_frames: int | None = option(
        None,
        "Files: largest number of frames that are taken of a video; of longer ones, frames are further apart; default: "
        "the model's (Qwen: 768).",
        flag=KEY_ONLY,
        valid=AT_LEAST_1,
        needs=DATASETS,
    )
    video_max_tokens: int | None = option(
        None,
        "Files: largest number of image tokens that a video becomes: its frames are shrunk, then left out; default: "
        "half of --seq-length.",
        valid=AT_LEAST_1,
        needs=DATASETS,
    )
    shuffle: bool = option(
        True, "Files: shuffle samples anew in each epoch; off: use the order of the files.", needs=DATASETS
    )
    packing: bool = option(
        True, "Files: pack several samples into each sequence; samples do not attend to one another.", needs=DATASETS
    )
    packing_window: int = option(
        2048,
        "Files: number of samples that are packed together; a larger window leaves less padding.",
        valid=AT_LEAST_1,
        needs=(DATASETS, Needs(lambda config: config.data.packing, "with --no-packing", "use --packing")),
    )
    balance: bool = option(
        True,
        "Files: assign sequences to ranks and micro-batches so that their compute cost is even.",
        flag=KEY_ONLY,
        needs=DATASETS,
    )
    num_workers: int = option(
        2,
        "Files: number of processes per model replica that read and decode samples; 0: one thread of the training "
        "process.",
        valid=AT_LEAST_0,
    )
    worker_timeout: float = option(
        150.0,  # three times that are less than a default --distributed-timeout-minutes
        "Files: time limit in seconds for reading a sample. A worker process that exceeds it is replaced, and the "
        "sample is skipped after three; where the training process reads by itself (--num-workers 0, and tars), the "
        "run saves and ends. 0: no limit.",
        flag="--data-worker-timeout",
        valid=AT_LEAST_0,
        needs=DATASETS,
    )
    max_bad_sample_rate: float = option(
        0.05,
        "Files: fraction of skipped samples above which the run ends, once 20 samples were skipped.",
        valid=FRACTION,
        needs=DATASETS,
    )
    images_per_sample: tuple[int, ...] = option(
        (1,),
        "Synthetic: numbers of images per sample; samples cycle through the list.",
        valid=Valid("from 0 to 10,000", lambda value: 0 <= value <= 10_000),
        needs=SYNTHETIC,
    )
    image_sizes: tuple[int, ...] = option(
        (),
        "Synthetic: image sides in pixels; images cycle through the list. Default: model.vision.image_size.",
        valid=AT_LEAST_1,
        needs=SYNTHETIC,
    )
    imageless_share: float = option(
        0.0, "Synthetic: fraction of samples without images.", flag=KEY_ONLY, valid=FRACTION, needs=SYNTHETIC
    )
    imageless_samples: tuple[int, ...] = option(
        (),
        "Synthetic: indices (from 0) of samples in each global batch that have no images; default: no index.",
        flag=KEY_ONLY,
        valid=AT_LEAST_0,
        needs=SYNTHETIC,
    )
    answer_share: float = option(
        0.5,
        "Synthetic: fraction of a sample's text tokens that have a loss.",
        flag=KEY_ONLY,
        valid=SHARE,
        needs=SYNTHETIC,
    )
    sources: SourceSections = field(default_factory=SourceSections)


@dataclass(frozen=True)
class CheckpointConfig:
    save_interval: int = option(
        None,
        "Steps between saves; default: 0 (at end), given weights: 500.",
        common=FILES,
        valid=AT_LEAST_0,
        needs=SAVES,
    )
    keep_checkpoints: int = option(
        2, "Number of latest checkpoints to keep; 0: keep all.", valid=AT_LEAST_0, needs=SAVES
    )
    keep_every: int = option(
        0,
        "Also keep checkpoints whose iteration is a multiple of this; 0: none of them.",
        flag=KEY_ONLY,
        valid=AT_LEAST_0,
        needs=SAVES,
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
    keep_best_mode: Literal["min", "max"] = option(
        "min",
        "Whether the smallest or the largest value is the best one.",
        flag=KEY_ONLY,
        needs=Needs(
            lambda config: config.checkpoint.keep_best is not None, "without --keep-best", "add --keep-best loss"
        ),
    )
    save: bool = option(True, "Write checkpoints; --save-interval sets how often.")
    async_save: bool = option(
        True, "Write checkpoints while training goes on; off: training waits until they are written.", needs=SAVES
    )
    checkpoint_dir: str | None = option(
        None,
        "Folder or URL (gs://…, s3://…) for copies of checkpoints, from which a run goes on if --run-dir has none as "
        "new; default: none.",
    )
    load: str | None = option(
        None,
        "Run folder, checkpoint or URL to continue from if --run-dir has no checkpoint; default: none.",
        common=FILES,
    )
    fallback: bool = option(
        True,
        "Load an older checkpoint if the newest one is damaged; off: end with an error instead.",
    )
    accept_changed_data: bool = option(
        False,
        "Resume although seed, files, shuffling or packing changed: the position in the data then means other samples.",
    )
    init_from: str | None = option(
        None,
        "Hugging Face folder, name of the hub or URL to begin with; default: none.",
        common=MODEL,
    )
    vision_from: str | None = option(
        None,
        "Folder or URL of the vision encoder; default: none.",
        common=MODEL,
    )
    language_from: str | None = option(None, "Folder or URL of the language model; default: none.", common=MODEL)
    projector_from: str | None = option(
        None, "Folder or URL of a connector, such as BLIP-2's Q-Former, for --vision-from and so on; default: none."
    )


@dataclass(frozen=True)
class RunConfig:
    """The run itself."""

    run_dir: str = option(
        "runs/latest",
        "Output folder; if it has checkpoints, the run resumes from the latest one.",
        common=FILES,
    )
    dry_run: bool = option(
        False,
        "Print the plan and memory estimate and exit.",
        common=FILES,
    )
    extension: tuple[str, ...] = option(
        (),
        "Packages that add connectors, objectives, vision inputs, data sources, callbacks or families: MODULE or "
        "the name of an entry point of each; may be repeated; default: none.",
    )
    world_size: int | None = option(
        None,
        "Number of processes that --dry-run assumes; default: those that are started, or that a model replica needs.",
        valid=AT_LEAST_1,
    )
    hang_timeout: float | None = option(
        None,
        "Seconds without progress of any rank after which the run ends, and all ranks write their stacks to RUN_DIR; "
        "0: never. Default: ten times the median step, at least 60.",
        valid=AT_LEAST_0,
    )


@dataclass(frozen=True)
class Config:
    """A whole run. `--print-config` prints it, RUN_DIR/config.yaml keeps it, `--config` reads it back."""

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
