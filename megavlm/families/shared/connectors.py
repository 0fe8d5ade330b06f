"""Families for Hugging Face folders that hold only a connector: its weights and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

from megavlm.arch.connector import Connector, connector_of
from megavlm.arch.layers import PROJECTOR
from megavlm.config.registry import ConnectorSections, registered
from megavlm.config.schema import ModelConfig, ProjectorConfig
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Rename, Table
from megavlm.rules.fields import record_of

_SECTION = "megavlm"  # section of an exported connector's config.json with its options


def connector_families() -> tuple[Family, ...]:
    """Return a family for each registered connector that can be loaded from Hugging Face folders."""
    found = (each for each in registered("connectors").values() if isinstance(each, Connector))
    return tuple(_family(connector) for connector in found if connector.hf_names(ModelConfig()))


@cache
def _family(connector: Connector) -> Family:
    # A connector may have several sets of tensor names; the prefix is the number of the set.
    names = tuple(NamePrefixes(projector=str(number)) for number in range(len(connector.hf_names(ModelConfig()))))
    return Family(
        name=connector.name,
        model_types=(*connector.hf_types, _own_type(connector)),
        config=partial(_model, connector),
        table=partial(_table, connector),
        name_prefixes=names,
        parts=(PROJECTOR,),
        unused=(".*",),  # the folder of a whole model also has other weights
        partial=True,
    )


def _model(connector: Connector, settings: Settings) -> ModelConfig:
    return ModelConfig(projector=_with(connector, ProjectorConfig(), _decided(connector, settings)))


def _table(connector: Connector, model: ModelConfig, prefixes: NamePrefixes) -> Table:
    names = connector.hf_names(model)[int(prefixes.projector)]
    return {f"{PROJECTOR}.{key}": Rename(name) for key, name in names.items()}


def decided_of(settings: Settings) -> Mapping[str, Any]:
    """Return the connector options that the config.json of a connector's folder sets."""
    return _decided(_connector_of(settings), settings)


def exported_config(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json for an export of the model's connector.

    It has the settings for Transformers' class of the connector, if there is one, and a section `megavlm` with all
    options.
    """
    connector = connector_of(model.projector)
    said = connector.hf_config(model) or {"model_type": _own_type(connector)}
    if connector.options is None:
        return {**said, _SECTION: {name: getattr(model.projector, name) for name in connector.reads}}
    return {**said, _SECTION: asdict(connector.own(model))}


def _own_type(connector: Connector) -> str:
    """Return the `model_type` for exports of a connector that Transformers does not implement."""
    return f"megavlm_{connector.name}"


def _decided(connector: Connector, settings: Settings) -> Mapping[str, Any]:
    if _SECTION not in settings.values:
        return connector.from_hf(settings)
    section = settings.section(_SECTION)
    found = record_of(connector.options or ProjectorConfig, section.values, name=section.where)
    return {name: getattr(found, name) for name in section.values}


def _with(connector: Connector, projector: ProjectorConfig, values: Mapping[str, Any]) -> ProjectorConfig:
    """Return a projector of the connector's kind with the given options; an MLP's options are the projector's own."""
    if connector.options is None:
        return replace(projector, **{**values, "kind": connector.name})
    own = replace(getattr(projector.connectors, connector.name), **values)
    sections = ConnectorSections({**projector.connectors, connector.name: own})
    return replace(projector, kind=connector.name, connectors=sections)


def _connector_of(settings: Settings) -> Connector:
    family = next(each for each in connector_families() if settings.values.get("model_type") in each.model_types)
    connector = registered("connectors")[family.name]
    assert isinstance(connector, Connector), family.name
    return connector


def with_connector(given: ProjectorConfig, settings: Settings) -> ProjectorConfig:
    """Return `given` with the connector kind and options of a folder's config.json; other options are kept."""
    connector = _connector_of(settings)
    return _with(connector, given, _decided(connector, settings))
