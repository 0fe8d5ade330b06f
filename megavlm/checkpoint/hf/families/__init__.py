"""The architectures that can be read and written: one file each, listed here."""

from __future__ import annotations

from megavlm.checkpoint.hf.families.internvl import INTERNVL
from megavlm.checkpoint.hf.families.llava import LLAVA
from megavlm.checkpoint.hf.families.llava_onevision import LLAVA_ONEVISION
from megavlm.checkpoint.hf.families.qwen2_5_vl import QWEN2_5_VL
from megavlm.checkpoint.hf.families.qwen3_vl import QWEN3_VL
from megavlm.checkpoint.hf.families.smolvlm import SMOLVLM
from megavlm.checkpoint.hf.families.towers import CLIP, INTERN_VIT, SIGLIP, TEXT
from megavlm.checkpoint.hf.family import Family
from megavlm.checkpoint.hf.settings import Settings
from megavlm.errors import UserError

FAMILIES: tuple[Family, ...] = (
    LLAVA,
    INTERNVL,
    LLAVA_ONEVISION,
    QWEN2_5_VL,
    QWEN3_VL,
    SMOLVLM,
    CLIP,
    SIGLIP,
    INTERN_VIT,
    TEXT,
)


def family_of(settings: Settings) -> Family:
    """The family that a config.json belongs to. Raises UserError naming those there are."""
    kind = settings.need("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = ", ".join(kind for family in FAMILIES for kind in family.model_types)
    raise UserError(f"{settings.where}: model_type {kind!r} is not supported; supported are {known}")
