"""What options of several sections need to have an effect; that of one section is declared beside its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megavlm.config.option import Needs

if TYPE_CHECKING:
    from megavlm.config.schema import Config


def data_kind(config: Config) -> str:
    """Return `--data` or its default, for code that runs before `resolve`."""
    given: str | None = config.data.kind
    return given if given is not None else "files" if config.data.datasets else "synthetic"


def has_validation(config: Config) -> bool:
    """Return whether a run has samples that it does not train on, whose loss it measures."""
    return bool(config.data.validation) or config.data.validation_split > 0 or data_kind(config) == "digits"


DATASETS = Needs(
    lambda config: data_kind(config) == "files", "without --datasets", "name your data sets with --datasets"
)
EXPERTS = Needs(lambda config: config.model.experts.num_experts > 0, "without experts", "add --num-experts 8")
COLOCATED = Needs(
    lambda config: config.placement.encoder == "colocated",
    "without a colocated encoder",
    "add --placement colocated",
)
