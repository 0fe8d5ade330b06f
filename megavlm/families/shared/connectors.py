"""Hugging Face folders that hold a connector's weights, as families of which the projector is the only part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

from megavlm.arch.connector import Connector
from megavlm.arch.layers import PROJECTOR
from megavlm.config.fields import record_of
from megavlm.config.registry import ConnectorSections, registered
from megavlm.config.schema import ModelConfig, ProjectorConfig
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Rename, Table


def connector_families() -> tuple[Family, ...]:
    """Return a family for each connector that reads folders."""
    found = (each for each in registered("connectors").values() if isinstance(each, Connector))
    return tuple(_family(connector) for connector in found if connector.hf_types)


@cache
def _family(connector: Connector) -> Family:
    # Sets of names, which folders have used, go by their numbers.
    names = tuple(NamePrefixes(projector=str(number)) for number in range(len(connector.hf_names(ModelConfig()))))
    return Family(
        name=connector.name,
        model_types=connector.hf_types,
        config=partial(_model, connector),
        table=partial(_table, connector),
        name_prefixes=names,
        parts=(PROJECTOR,),
        unused=(".*",),  # a whole model has other parts
        partial=True,
    )


def _model(connector: Connector, settings: Settings) -> ModelConfig:
    assert connector.options is not None, connector.name
    own = record_of(connector.options, connector.from_hf(settings), name=settings.where)
    sections = ConnectorSections({connector.name: own})
    return ModelConfig(projector=ProjectorConfig(kind=connector.name, connectors=sections))


def _table(connector: Connector, model: ModelConfig, prefixes: NamePrefixes) -> Table:
    names = connector.hf_names(model)[int(prefixes.projector)]
    return {f"{PROJECTOR}.{key}": Rename(name) for key, name in names.items()}


def decided_of(settings: Settings) -> Mapping[str, Any]:
    """Return the options of a connector that the config.json of its folder decides."""
    return _connector_of(settings).from_hf(settings)


def _connector_of(settings: Settings) -> Connector:
    family = next(each for each in connector_families() if settings.values.get("model_type") in each.model_types)
    connector = registered("connectors")[family.name]
    assert isinstance(connector, Connector), family.name
    return connector


def with_connector(given: ProjectorConfig, settings: Settings) -> ProjectorConfig:
    """Return the projector with the connector of a folder with this config.json; what that leaves open is as given."""
    connector = _connector_of(settings)
    own = replace(getattr(given.connectors, connector.name), **connector.from_hf(settings))
    return replace(given, kind=connector.name, connectors=ConnectorSections({**given.connectors, connector.name: own}))
