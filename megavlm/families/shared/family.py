"""`Family`: all that is particular to one architecture of Hugging Face Transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megavlm.arch.image_tokens import Tiling
from megavlm.config.schema import ModelConfig
from megavlm.families.shared.chat import NamedTemplate
from megavlm.families.shared.experts import ExpertFiles
from megavlm.families.shared.inputs import Batch, Given
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table
from megavlm.inputs.reader import ProcessorReader, VideoReader

ALL_PARTS = ("vision", "projector", "language")


@dataclass(frozen=True)
class NamePrefixes:
    """What precedes the names of tensors in a file: one architecture has been saved under several sets of names.

    `experts` says how a file holds the experts of a layer, `further_experts` those of a layer that predicts a further
    token where they differ.
    """

    vision: str = ""
    projector: str = ""
    language: str = ""
    head: str = "lm_head.weight"
    experts: ExpertFiles = "apart"
    further_experts: ExpertFiles | None = None


def llava_prefixes(*towers: str) -> tuple[NamePrefixes, ...]:
    """Return what precedes the names in models that are made like LLaVA, saved before and since Transformers 4.52."""
    head, projector = "language_model.lm_head.weight", "multi_modal_projector."
    return (
        *(NamePrefixes(tower, projector, "language_model.model.", head) for tower in towers),
        *(NamePrefixes(f"model.{tower}", f"model.{projector}", "model.language_model.") for tower in towers),
    )


# A tower may be a model of its own inside.
NESTED_TOWERS = ("vision_tower.", "vision_tower.vision_model.")


@dataclass(frozen=True)
class Predictors:
    """How files of a family hold layers that predict further tokens. A run that trains them has them in its `table`.

    Args:
        names: pattern of their tensors, which are carried along if a run does not train them.
        most: how many layers are known.
        copies: `ModelConfig` and prefixes → each tensor of theirs that repeats another one, with that one.
    """

    names: str
    most: int = 1
    copies: Callable[[ModelConfig, NamePrefixes], dict[str, str]] = lambda model, prefixes: {}


@dataclass(frozen=True)
class Family:
    """An architecture's configuration, weights, inputs, image processor and chat template.

    Args:
        name: how messages call the family.
        model_types: values of `model_type` in config.json that belong to the family; "llava/pixtral" is one of the
            outer configuration and of its vision_config.
        config: config.json → `ModelConfig`. Raises UserError for a setting that we cannot express exactly.
        table: `ModelConfig` and prefixes → where each megatron-core tensor is in the files.
        name_prefixes: newest first; the first set under which a folder has the weights is used.
        parts: which parts of a VLM its checkpoints hold: "vision", "projector", "language".
        unused: patterns (regular expressions, full match) of weights that the features do not depend on. They are not
            trained here, and an export returns them unchanged.
        predictors: its layers that predict further tokens; None: none are known.
        inputs: a micro-batch → keyword arguments of the Transformers model's forward.
        tiling: config.json → how the model divides an image into tiles, if it does.
        image_processors: readers of the image processor classes that its folders name.
        videos: reader of its video processor's options; None: it is trained on images alone.
        image_text: how its tokenizers write the image token.
        chat_template: the template of folders that come without one.
        not_in_peft: linear layers whose adapters PEFT would take for adapters of experts: no file can hold them.
        partial: weights of a part that a folder lacks are drawn at random (a connector without its learned queries).
        compose: config.json of a model of this family that consists of a vision tower and a language model; None where
            the family computes something else.
        processor: processor_config.json of such a model, but for its image token.
        complete: adds to a model of Transformers what its class leaves out of config.json.
    """

    name: str
    model_types: tuple[str, ...]
    config: Callable[[Settings], ModelConfig]
    table: Callable[[ModelConfig, NamePrefixes], Table]
    name_prefixes: tuple[NamePrefixes, ...]
    parts: tuple[str, ...] = ALL_PARTS
    unused: tuple[str, ...] = ()
    predictors: Predictors | None = None
    inputs: Callable[[Batch, ModelConfig], Given] | None = None
    tiling: Callable[[Settings], Tiling] | None = None
    image_processors: tuple[ProcessorReader, ...] = ()
    videos: VideoReader | None = None
    image_text: str = "<image>"
    chat_template: NamedTemplate | None = None
    not_in_peft: tuple[str, ...] = ()
    compose: Callable[[Composition], dict[str, Any] | None] | None = None
    processor: Callable[[ModelConfig], dict[str, Any]] | None = None
    partial: bool = False
    complete: Callable[[Any], None] = lambda model: None


@dataclass(frozen=True)
class Composition:
    """A vision tower and a language model from two folders, and the model that a run makes of them."""

    vision_family: str
    vision: Settings  # config.json of the tower's folder
    language: Settings  # config.json of the language model's folder
    model: ModelConfig
    image_token: int
