"""Options of training and validation data. Part of the schema (`schema.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from megavlm.config.option import (
    DATA,
    DATASETS,
    FRACTION,
    KEY_ONLY,
    SHARE,
    VISION,
    Below1,
    Count,
    Natural,
    Needs,
    NotNegative,
    Positive,
    Valid,
    data_kind,
    option,
)
from megavlm.config.registry import SourceSections
from megavlm.config.vision_schema import AUDIO

SYNTHETIC = Needs(lambda config: data_kind(config) == "synthetic", "except on synthetic data", "use --data synthetic")
TEACHER = Needs(lambda config: config.data.teacher is not None, "without a teacher", "set data.teacher=DIR")
TOKENS = Needs(
    lambda config: config.model.objective.kind == "next-token", "with another objective", "leave out --objective"
)
of_files, of_synthetic = partial(option, needs=DATASETS), partial(option, needs=SYNTHETIC)
of_images = partial(option, needs=(DATASETS, VISION))


@dataclass(frozen=True)
class DatasetConfig:
    """One data set of the user (`data.datasets`, or `--datasets PATH,weight=2,image_root=DIR …`)."""

    path: str = option("", "File of records, or for webdataset the folder of tars; or its URL.")
    kind: Literal[
        "auto", "llava", "messages", "query", "alpaca", "vqa", "cauldron", "text", "pairs", "preferences", "webdataset"
    ] = option("auto", "Format of a record, or webdataset for tars; auto detects it (docs/data.md).")
    weight: Positive | None = option(
        None,
        "Sampling weight relative to the other data sets; default: its number of records, so that an epoch has each "
        "record once, or 1 if others have a weight.",
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
    validation: tuple[DatasetConfig, ...] = of_files((), "Data sets for validation; default: none.", common=DATA)
    validation_split: Below1 = of_files(0.0, "Share of --datasets held out for validation.", common=DATA)
    tokenizer: str | None = of_files(
        None,
        "Hugging Face tokenizer folder or SentencePiece file; default: that of --init-from or --language-from.",
        common=DATA,
    )
    chat_template: str = of_files(
        "auto",
        "Files: name of a built-in chat template, a .jinja file, or auto (the tokenizer's, else the model family's).",
    )
    train_on: Literal["assistant", "last", "all"] = of_files(
        "assistant", "Files: tokens with a loss: all assistant turns, the last assistant turn, or all tokens."
    )
    enable_thinking: bool | None = of_files(
        None,
        "Files: enable_thinking of chat templates that use it (Qwen3.5); false: the empty thoughts that they write "
        "before answers have no loss. Default: the template's.",
        flag=KEY_ONLY,
    )
    image_processor: str | None = of_images(
        None,
        "Files: folder with preprocessor_config.json; default: the Hugging Face model's, or with random weights one "
        "that resizes images to model.vision.image_size.",
    )
    min_pixels: Count | None = of_images(
        None,
        "Files, Qwen's models: enlarge images to at least this number of pixels; default: preprocessor_config.json's.",
    )
    max_pixels: Count | None = of_images(
        None,
        "Files, Qwen's models: shrink images to at most this number of pixels, as MAX_PIXELS elsewhere (one image "
        "token is 28 × 28 or 32 × 32 pixels); default: preprocessor_config.json's.",
    )
    vision_input: str | None = of_images(
        None,
        "Files: what the vision encoder sees of an image: rgb, or array, all channels of .npy, .npz, "
        "TIFF and other files, or a name of an --extension; default: what the model was trained on, else rgb.",
        point="inputs",
    )
    channel_statistics: str | None = of_images(
        None,
        "Files: mean and deviation of each channel, in a file that `megavlm channels` writes; default: the model's.",
    )
    fast_image_resize: bool = of_images(
        False, "Files: use a faster image resize, which differs by up to 3 of 255 levels in few pixels.", flag=KEY_ONLY
    )
    max_image_pixels: Count = of_images(
        2**26, "Files: skip samples with an image of more pixels than this, before the image is decoded."
    )
    augment_crop: float = of_images(
        1.0,
        "Files: train on a random part of each image, of at least this share of each side, enlarged to its size; "
        "records whose text has boxes keep theirs. Default: whole images.",
        flag=KEY_ONLY,
        valid=SHARE,
    )
    augment_color: float = of_images(
        0.0,
        "Files: change brightness, contrast and saturation of each image that is trained on by up to this share.",
        flag=KEY_ONLY,
        valid=FRACTION,
    )
    teacher: str | None = option(
        None,
        "Files: folder of scores that `megavlm logprobs TEACHER DATA --top-k K` wrote, to train on the teacher's K "
        "likeliest tokens (distillation); default: on the data's tokens alone.",
        flag=KEY_ONLY,
        needs=(DATASETS, TOKENS),
    )
    teacher_weight: float = option(
        1.0,
        "Weight of the teacher's probabilities in the loss; the data's tokens have what is left of 1.",
        flag=KEY_ONLY,
        valid=SHARE,
        needs=TEACHER,
    )
    video_fps: Positive | None = of_images(
        None,
        "Files: number of frames per second of a video; a record may set another rate; default: the model's (Qwen: 2).",
    )
    video_max_frames: Count | None = of_images(
        None,
        "Files: maximum number of frames per video; frames of longer videos are further apart; default: the model's "
        "(Qwen: 768).",
        flag=KEY_ONLY,
    )
    video_max_tokens: Count | None = of_images(
        None,
        "Files: maximum number of image tokens per video: its frames are shrunk, then dropped; default: half of "
        "--seq-length.",
    )
    video_sound: bool = of_files(False, "Files: use the sound of videos.", flag=KEY_ONLY, needs=(DATASETS, AUDIO))
    shuffle: bool = of_files(True, "Files: shuffle samples anew in each epoch; off: use the order of the files.")
    packing: bool = of_files(
        True, "Files: pack several samples into each sequence; samples do not attend to one another."
    )
    packing_window: Count = option(
        2048,
        "Files: number of samples that are packed together; a larger window leaves less padding.",
        needs=(DATASETS, Needs(lambda config: config.data.packing, "with --no-packing", "use --packing")),
    )
    balance: bool = of_files(
        True, "Files: assign sequences to ranks and micro-batches so that their compute cost is even.", flag=KEY_ONLY
    )
    num_workers: Natural = option(
        2,
        "Files: number of processes per model replica that read and decode samples; 0: one thread of the training "
        "process.",
    )
    worker_timeout: NotNegative = of_files(
        150.0,  # three times that are less than a default --distributed-timeout-minutes
        "Files: time limit in seconds for reading a sample. A worker process that exceeds it is replaced; after three "
        "replacements at the same samples the run saves and ends. 0: no limit.",
        flag="--data-worker-timeout",
    )
    max_bad_sample_rate: float = of_files(
        0.05,
        "Files: fraction of skipped samples above which the run ends, once 20 samples were skipped.",
        valid=FRACTION,
    )
    images_per_sample: tuple[int, ...] = of_synthetic(
        (1,),
        "Synthetic: numbers of images per sample; samples cycle through the list.",
        valid=Valid("from 0 to 10,000", lambda value: 0 <= value <= 10_000),
    )
    image_sizes: tuple[Count, ...] = of_synthetic(
        (), "Synthetic: image sides in pixels; images cycle through the list. Default: model.vision.image_size."
    )
    imageless_share: float = of_synthetic(0.0, "Synthetic: share without images.", flag=KEY_ONLY, valid=FRACTION)
    imageless_samples: tuple[Natural, ...] = of_synthetic(
        (),
        "Synthetic: indices (from 0) of samples in each global batch that have no images; default: no index.",
        flag=KEY_ONLY,
    )
    sound_frames: tuple[Natural, ...] = of_synthetic(
        (),
        "Synthetic: mel frames of a sample's sound, 100 a second; samples cycle through the list, 0 is none. Default: "
        "no sounds.",
        flag=KEY_ONLY,
        needs=(SYNTHETIC, AUDIO),
    )
    answer_share: float = of_synthetic(0.5, "Synthetic: share of text tokens with a loss.", flag=KEY_ONLY, valid=SHARE)
    sources: SourceSections = field(default_factory=SourceSections)
