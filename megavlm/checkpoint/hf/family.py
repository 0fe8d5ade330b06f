"""`Family`: all that is particular to one architecture of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megavlm.checkpoint.hf.settings import Settings
from megavlm.checkpoint.hf.table import Table
from megavlm.config.schema import ModelConfig
from megavlm.data.anyres import Tiling
from megavlm.data.batch import MicroBatch


@dataclass(frozen=True)
class Spelling:
    """What precedes names in a file: the same architecture has been saved under several spellings."""

    vision: str = ""
    projector: str = ""
    language: str = ""
    head: str = "lm_head.weight"


@dataclass(frozen=True)
class Family:
    """Config, names and inputs of an architecture.

    Args:
        model_types: values of `model_type` in config.json that belong here.
        parts: which parts of a VLM its checkpoints hold: "vision", "projector", "language".
        config: config.json → our model. Refuses (UserError) what we cannot express exactly.
        table: our model → names, with the prefixes of a spelling.
        spellings: newest first; the first one under which a folder has the weights is used.
        unused: patterns (regular expressions, full match) of weights that the features do not depend on. They are not
            trained here, and an export returns them as they came.
        inputs: a micro-batch as keyword arguments of the Transformers model.
        tiling: config.json → how the model divides an image into tiles, if it does.
    """

    name: str
    model_types: tuple[str, ...]
    config: Callable[[Settings], ModelConfig]
    table: Callable[[ModelConfig, Spelling], Table]
    spellings: tuple[Spelling, ...]
    parts: tuple[str, ...] = ("vision", "projector", "language")
    unused: tuple[str, ...] = ()
    inputs: Callable[[MicroBatch, ModelConfig], dict[str, Tensor]] | None = None
    tiling: Callable[[Settings], Tiling] | None = None
