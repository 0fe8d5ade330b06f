"""Compare the size of a model that a file describes with the tensors that are there, before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from megavlm.arch.kinds import model_parameters
from megavlm.arch.layers import layer_names, part_of
from megavlm.config.schema import ModelConfig
from megavlm.errors import UserError
from megavlm.families.shared.table import Shape
from megavlm.rules.defaults import resolve_model

_SLACK = 2  # so much less than the description may be there: what exactly is missing is listed later


def check_size(model: ModelConfig, parts: Collection[str], shapes: Collection[Shape], *, where: str) -> None:
    """Raise UserError if parts of a model are far larger than the tensors of these shapes.

    Settings may be those of a real model each, and ask for terabytes together. `where` names files and remedy.
    """
    layers = sum(getattr(model, part).num_layers for part in ("vision", "language") if part in parts)
    if layers > _SLACK * len(shapes):  # each layer has several
        raise UserError(f"a model of {layers} layers is described, and there are {len(shapes)} tensors: {where}")
    model = resolve_model(model)
    described = sum(model_parameters(name, model) for name in layer_names(model) if part_of(name) in parts)
    there = sum(map(math.prod, shapes))
    if described > _SLACK * there:
        raise UserError(f"a model of {described:,} parameters is described, and there are {there:,}: {where}")


def check_connector(decided: Mapping[str, Any], shapes: Collection[Shape], *, where: str) -> None:
    """Raise UserError if a connector's config.json names a size that none of its folder's tensors has room for.

    What else a connector's size depends on, the width of the tower and of the language model, is not in its folder.
    """
    largest = max([len(shapes), *(size for shape in shapes for size in shape)], default=0)
    for name, value in decided.items():
        if isinstance(value, int) and value > largest:
            raise UserError(f"{name} {value} is described, and no tensor is larger than {largest}: {where}")
