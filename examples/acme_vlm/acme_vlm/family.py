"""The family: what config.json means, and where the weights are (docs/extensions.md describes what else there is)."""

from __future__ import annotations

from megavlm.config.schema import ModelConfig, ProjectorConfig
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.language import language, language_table
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table, linear
from megavlm.families.shared.vision import siglip, siglip_table


def config(settings: Settings) -> ModelConfig:
    """Return the model that a config.json describes: a SigLIP tower, two linear layers with GELU, and a Llama."""
    settings.require("bridge_activation", "gelu", why="only GELU is known here")
    decoder = settings.section("decoder")
    return ModelConfig(
        vision=siglip(
            settings.section("encoder"), feature_layer=settings.get("vision_feature_layer", -2), post_norm=False
        ),
        projector=ProjectorConfig(kind="mlp"),
        language=language(decoder, kind="llama"),
        image_token=settings.need("image_token_id"),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    return {
        **siglip_table(model.vision, prefixes.vision),
        **linear("projector.linear_fc1", f"{prefixes.projector}wide", bias=True),
        **linear("projector.linear_fc2", f"{prefixes.projector}narrow", bias=True),
        **language_table(model, prefixes),
    }


FAMILY = Family(
    name="acme_vlm",
    model_types=("acme_vlm",),
    config=config,
    table=table,
    name_prefixes=(NamePrefixes("encoder.", "bridge.", "decoder.", "decoder.head.weight"),),
    unused=(r"encoder\..*",),  # layers after the one that features are taken from
)
