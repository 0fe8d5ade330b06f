"""`Family`: the settings, weights, inputs and processors of one architecture of Hugging Face Transformers."""

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
LANGUAGE_ALONE = ("language",)  # of a language model, which can be trained without a vision tower


@dataclass(frozen=True)
class NamePrefixes:
    """Prefixes of tensor names in a file. An architecture has one set for each naming under which it has been saved.

    `experts` says how a file stores the experts of a layer; `further_experts` says it for layers that predict further
    tokens, if they are stored in another way.
    """

    vision: str = ""
    projector: str = ""
    language: str = ""
    head: str = "lm_head.weight"
    experts: ExpertFiles = "apart"
    further_experts: ExpertFiles | None = None


def llava_prefixes(*towers: str) -> tuple[NamePrefixes, ...]:
    """Return the name prefixes of models with LLaVA's modules, saved before and since Transformers 4.52."""
    head, projector = "language_model.lm_head.weight", "multi_modal_projector."
    return (
        *(NamePrefixes(tower, projector, "language_model.model.", head) for tower in towers),
        *(NamePrefixes(f"model.{tower}", f"model.{projector}", "model.language_model.") for tower in towers),
    )


# Some files nest the tower's modules in a `vision_model`.
NESTED_TOWERS = ("vision_tower.", "vision_tower.vision_model.")


@dataclass(frozen=True)
class Predictors:
    """How files store a family's layers that predict further tokens. If a run trains them, they are in its `table`.

    Args:
        names: pattern of the layers' tensor names; tensors that a run does not train are exported unchanged.
        most: largest supported number of layers.
        copies: `ModelConfig` and prefixes → for each tensor of the layers that repeats another tensor, the name of
            that tensor.
    """

    names: str
    most: int = 1
    copies: Callable[[ModelConfig, NamePrefixes], dict[str, str]] = lambda model, prefixes: {}


@dataclass(frozen=True)
class Family:
    """An architecture's configuration, weights, inputs, image processor and chat template.

    Args:
        name: the family's name in messages.
        model_types: values of `model_type` in config.json that belong to the family; "llava/pixtral" combines
            the model_type of the outer configuration with that of its vision_config.
        config: config.json → `ModelConfig`. Raises UserError for a setting that `ModelConfig` cannot express exactly.
        table: `ModelConfig` and prefixes → where each megatron-core tensor is in the files.
        name_prefixes: sets of name prefixes, newest first; the set with the most names in a folder is used (of equal
            ones the first).
        parts: which parts of a VLM its checkpoints hold: "vision", "projector", "language".
        unused: patterns (regular expressions, full match) of weights that do not affect the features. They are not
            trained, and are exported unchanged.
        predictors: layers that predict further tokens; None if the family has none or they are not supported.
        inputs: a micro-batch → keyword arguments of the Transformers model's forward.
        tiling: config.json → how the model divides an image into tiles; None for a model without tiles.
        image_processors: readers of the image processor classes that the family's folders name.
        videos: reader of the video processor's options; None for a family that is trained on images alone.
        image_text: text of the image token in the family's tokenizers.
        chat_template: chat template for folders without one.
        not_in_peft: linear layers with adapters that PEFT would mistake for adapters of experts, so that they cannot be
            saved.
        partial: weights that a folder lacks are initialised at random (a connector without its learned queries).
        compose: a vision tower and a language model → config.json of a model of this family that combines them; None
            if the family computes something else.
        processor: processor_config.json of a composed model, without its image token.
        complete: adds computations of config.json that Transformers' class leaves out to a loaded model.
        runs: class of Transformers that computes what is trained, if folders name another.
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
    runs: str | None = None


@dataclass(frozen=True)
class Composition:
    """A vision tower and a language model from two folders, and the model that combines them."""

    vision_family: str
    vision: Settings  # config.json of the tower's folder
    language: Settings  # config.json of the language model's folder
    model: ModelConfig
    image_token: int
