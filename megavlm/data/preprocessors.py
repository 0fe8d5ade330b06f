"""Load the image processor and the tokenizer of a run, from its options or its pretrained folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling

from megavlm.config.derived import has_vision, usual_side
from megavlm.config.schema import Config, ModelConfig
from megavlm.data.tokenizers import NO_IMAGE, TextTokenizer
from megavlm.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megavlm.data.tokenizers.sentence_piece import IMAGE, SentencePieceTokenizer
from megavlm.errors import UserError
from megavlm.families import kind_of, processor_from
from megavlm.families.shared.qwen_vl import NativeResolution
from megavlm.inputs.processor import Processor, Whole
from megavlm.inputs.vision_inputs import NAME as CHANNELS
from megavlm.inputs.vision_inputs import RGB, read_channels, vision_input_of
from megavlm.json_files import read_json
from megavlm.program import program
from megavlm.storage.cache import local_path

_FILES = ("preprocessor_config.json", "processor_config.json")
_VIDEO = "video_preprocessor_config.json"
_TRIAL = "The quick brown fox jumps over 13 lazy dogs."
_BEYOND = 2**24 - 1  # the largest token id, used as the image token of a tokenizer that encodes only text


def processor_for(config: Config) -> Processor:
    """Return the image processor of `--image-processor`, else of the folder of the pretrained vision tower.

    For a tower with random weights, the processor resizes images to `model.vision.image_size`; for a language model
    alone it is never used. Raises UserError if the folder has no processor, or a processor that does not fit the model
    or cannot be read.
    """
    model = config.model
    if not has_vision(model):
        return _plain(model, fast=False)
    given = config.data.image_processor or config.checkpoint.init_from or config.checkpoint.vision_from
    data = config.data
    if given is None:
        processor: Processor = _plain(model, fast=data.fast_image_resize)
    elif (settings := image_settings(folder := local_path(given, "--image-processor", weights=False))) is not None:
        video, kind = _video_settings(folder), model_type(folder) or _type_of_tower(config)
        try:
            processor = processor_from(settings, model, fast=data.fast_image_resize, video=video, model_type=kind)
        except UserError as error:  # always names preprocessor_config.json: replaced by the path that was read
            file = str(folder / _FILES["image_processor" in settings])
            raise UserError(re.sub(rf"(?<!\w){_FILES[0]}", lambda _: file, str(error), count=1)) from error
    elif data.image_processor:
        raise UserError(f"--image-processor {given} has no {' and no '.join(_FILES)}: name a folder with one")
    else:
        raise UserError(
            f"{given} has no {' and no '.join(_FILES)}, so that nothing says how its model sees images: complete the "
            "download, or name a folder with one with --image-processor"
        )
    area = {f"--{name.replace('_', '-')}": getattr(data, name) for name in ("min_pixels", "max_pixels")}
    return _with_channels(_checked(with_area(processor, area), model), config, given)


def _type_of_tower(config: Config) -> str | None:
    """Return the architecture that the vision tower's pretrained folder names; None without such a folder."""
    given = config.checkpoint.init_from or config.checkpoint.vision_from
    return None if given is None else model_type(local_path(given, "--init-from", weights=False))


def with_area(processor: Processor, area: Mapping[str, int | None]) -> Processor:
    """Return the processor with the bounds of `area` that are not None: values of min_pixels and max_pixels by their
    names for the user.

    Raises UserError for a processor that does not keep images at their own size, and for a minimum above the maximum.
    """
    given: dict[str, Any] = {name: value for name, value in area.items() if value is not None}
    if not given:
        return processor
    flag = next(iter(given))
    if not isinstance(processor, NativeResolution):
        raise UserError(f"{flag} is for models that see images at their own size (Qwen's): leave it out")
    bounded = replace(processor, **{name.strip("-").replace("-", "_"): value for name, value in given.items()})
    if bounded.min_pixels > bounded.max_pixels:
        raise UserError(
            f"{flag} leaves images with at least {bounded.min_pixels} and at most {bounded.max_pixels} pixels: set "
            "--min-pixels below --max-pixels"
        )
    return bounded


def image_settings(folder: Path) -> Any:
    """Return the content of the JSON file that describes a folder's image processor; None if there is no such file.

    Of two, the newer kind of file is read, as by Transformers, which leaves the other where it saves into a folder.
    """
    for name in reversed(_FILES):
        if not (folder / name).exists():
            continue
        settings = read_json(folder / name)
        if name == _FILES[0] or "image_processor" in settings:
            return settings
    return None


def _video_settings(folder: Path) -> Any:
    """Return the settings of a folder's video processor or None; newer folders nest them in `processor_config.json`."""
    whole = folder / _FILES[1]
    nested = read_json(whole).get("video_processor") if whole.exists() else None
    if nested is None and (folder / _VIDEO).exists():
        nested = read_json(folder / _VIDEO)
    return nested


def _plain(model: ModelConfig, *, fast: bool) -> Whole:
    """Return a processor that resizes images of any shape to the tower's image size, with values from −1 to 1."""
    side, half = usual_side(model), (0.5, 0.5, 0.5)
    return Whole(
        patch_size=model.vision.patch_size,
        projector=model.projector,
        resample=Resampling.BICUBIC,
        mean=half,
        std=half,
        size=(side, side),
        fast=fast,
    )


def _checked(processor: Processor, model: ModelConfig) -> Processor:
    tiled = model.projector.anyres_max_tiles is not None
    if tiled != processor.anyres:
        raise UserError(
            "model.projector.anyres_max_tiles goes with an image processor that cuts images into anyres tiles, and "
            + ("--image-processor does not" if tiled else "it is left out")
            + ": name the folder of such a model, or change model.projector.anyres_max_tiles"
        )
    return processor


def _with_channels(processor: Processor, config: Config, given: str | None) -> Processor:
    """Return the processor for the channels of `--vision-input`, by default those of the model's folder, else RGB.

    Raises UserError if their number is not the model's, or if their means and deviations are not known.
    """
    data, wanted = config.data, config.model.vision.in_channels
    folder = None if given is None else local_path(given, "--image-processor", weights=False) / CHANNELS
    file = Path(data.channel_statistics) if data.channel_statistics else folder
    said, statistics = read_channels(file) if file is not None and file.exists() else (None, None)
    if data.channel_statistics and statistics is None:
        raise UserError(f"--channel-statistics {file} is not there: write it with {program('channels')}")
    name = data.vision_input or said or RGB.name
    vision_input = vision_input_of(name, wanted)
    if vision_input == RGB:
        if wanted != 3:
            raise UserError(
                f"model.vision.in_channels {wanted}: photos have 3 channels: leave it out, or add --vision-input array "
                "for images of other channels"
            )
        return processor
    statistics = statistics or vision_input.channels
    if statistics is None:
        raise UserError(
            f"--vision-input {name} needs the means and deviations of the channels: measure them with `megavlm "
            "channels`, and name the file with --channel-statistics"
        )
    if len(statistics.mean) != wanted:
        where = f"--vision-input {name} makes" if file is None or not file.exists() else f"{file} is of"
        raise UserError(
            f"{where} {len(statistics.mean)} channels and the model has {wanted}: set model.vision.in_channels "
            f"{len(statistics.mean)}"
        )
    return replace(processor, vision_input=vision_input, mean=statistics.mean, std=statistics.std)


def tokenizer_for(config: Config, *, image_text: str = IMAGE) -> TextTokenizer:
    """Return the tokenizer of `--tokenizer`, else of the folder of the pretrained language model.

    `image_text` is the image processor's spelling of the image token; it is used if `--image-token` is not set.
    Raises UserError if there is no tokenizer, if it has more tokens than the model, or if `--tokenizer` tokenizes text
    differently from the tokenizer of the pretrained weights.
    """
    path = tokenizer_path(config)
    image = config.model.image_token if has_vision(config.model) else NO_IMAGE
    if path.is_dir():
        tokenizer: TextTokenizer = HuggingFaceTokenizer.of(path, image=image, image_text=image_text)
    elif path.is_file():
        tokenizer = SentencePieceTokenizer(path, image=image, image_text=image_text)
    else:
        raise UserError(f"--tokenizer {path} is not there: give a Hugging Face folder or a SentencePiece model")
    vocabulary = config.model.language.vocab_size
    if image is not None and image != tokenizer.image:
        raise UserError(f"--image-token {image} is not in {path}, where it is {tokenizer.image}: leave it out")
    if vocabulary is not None and vocabulary < tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer {path} has {tokenizer.vocab_size} tokens, and the model {vocabulary}: give the model's own "
            "to --tokenizer"
        )
    own = config.checkpoint.init_from or config.checkpoint.language_from
    if config.data.tokenizer and own:
        _check_family(tokenizer, path, local_path(own, "--init-from", weights=False))
    return tokenizer


def _check_family(tokenizer: TextTokenizer, path: Path, model: Path) -> None:
    """Raise UserError if a tokenizer splits plain text into other tokens than the tokenizer in the model's folder.

    Pretrained weights are of use only with the tokens that they were trained on. A folder without a readable tokenizer
    is not checked.
    """
    try:
        own = HuggingFaceTokenizer.of(model, image=_BEYOND, image_text="<no image>")
    except UserError:
        return
    given, known = tokenizer.encode(_TRIAL).ids, own.encode(_TRIAL).ids
    if given.tolist() != known.tolist():
        raise UserError(
            f"--tokenizer {path} is of another family than the model in {model}: text that the model knows as tokens "
            f"{_first(known)} would become {_first(given)}: leave --tokenizer out"
        )


def _first(tokens: NDArray[np.int64]) -> str:
    return ", ".join(map(str, tokens[:3].tolist())) + ", …"


def tokenizer_path(config: Config) -> Path:
    """Return the file or folder of the tokenizer. Raises UserError if no option names one."""
    given = config.data.tokenizer or config.checkpoint.init_from or config.checkpoint.language_from
    if given is None:
        raise UserError(
            "--datasets need a tokenizer: give --tokenizer a Hugging Face folder or a SentencePiece model, or a "
            "model to --init-from"
        )
    return local_path(given, "--tokenizer", weights=False)


def model_type(path: Path) -> str | None:
    """Return the architecture that a folder's config.json names; None if it cannot be read or names none."""
    try:
        found = kind_of(read_json(path / "config.json"))
    except UserError:
        return None
    return found if isinstance(found, str) else None
