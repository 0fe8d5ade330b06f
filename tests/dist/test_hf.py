"""Families of Hugging Face checkpoints at layouts of two and four processes, against Transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from megavlm.backend import activate
from tests.support.pool import Pools

activate()  # before the modules below import megatron-core

from tests.support.hf_layout import Reference, assert_layout, make_reference  # noqa: E402
from tests.support.tiny_models import (  # noqa: E402
    gemma3,
    glm4v,
    internvl,
    llava,
    llava_next,
    llava_onevision,
    mistral3,
    pixtral,
    qwen_vl,
    smolvlm,
)

# Two micro-batches with equally many trained tokens: two images and none, one and one.
IMAGES = ([[(32, 32), (32, 32)], []], [[(32, 32)], [(32, 32)]])
SIZES = (*qwen_vl.IMAGES, [[], [(16, 8)]])

FAMILIES: dict[str, tuple[Callable[[], Any], Any]] = {
    "llava": (lambda: transformers.LlavaForConditionalGeneration(llava.vicuna()), IMAGES),
    "llava-tied": (lambda: transformers.LlavaForConditionalGeneration(llava.mistral_tied()), IMAGES),
    "internvl": (lambda: transformers.InternVLForConditionalGeneration(internvl.small()), IMAGES),
    "internvl-6b": (lambda: transformers.InternVLForConditionalGeneration(internvl.large()), IMAGES),
    "llava-next": (llava_next.llava_next, (llava_next.IMAGES[0], llava_next.IMAGES[3])),
    "llava-onevision": (llava_onevision.onevision, llava_onevision.IMAGES),
    "llava-onevision-tied": (lambda: llava_onevision.onevision(tied=True), llava_onevision.IMAGES),
    "llava-onevision-videos": (llava_onevision.onevision, llava_onevision.VIDEOS[:2]),
    "smolvlm": (smolvlm.smolvlm, smolvlm.IMAGES),
    "idefics3-tied": (smolvlm.idefics3, smolvlm.IMAGES),
    "gemma3": (lambda: gemma3.gemma3(num_key_value_heads=1), gemma3.IMAGES[::2]),
    "pixtral": (pixtral.pixtral, pixtral.IMAGES[::2]),
    "mistral3": (mistral3.mistral3, mistral3.IMAGES[::2]),
    "qwen2-vl": (qwen_vl.qwen2, SIZES),
    "qwen2.5-vl": (qwen_vl.qwen2_5, SIZES),
    "qwen2.5-vl-videos": (qwen_vl.qwen2_5, (*qwen_vl.VIDEOS, qwen_vl.IMAGES[1])),
    "glm4v": (glm4v.glm4v, SIZES),
    "qwen3-vl": (lambda: qwen_vl.qwen3(tied=True), SIZES),
    "qwen3-vl-videos": (qwen_vl.qwen3, (*qwen_vl.VIDEOS, qwen_vl.IMAGES[1])),
}
LAYOUTS = {"tp2": (2, "--tp 2"), "pp2": (2, "--pp 2"), "tp2-pp2-vpp2": (4, "--tp 2 --pp 2 --vpp 2")}
# The fast set: every family where all kinds of cuts meet, and two at the layouts that tell which of them is at fault.
ALONE = ("llava", "qwen3-vl")
LATER = ("qwen3-vl-videos", "llava-onevision-videos")
CASES = [
    pytest.param(
        family,
        layout,
        id=f"{family}-{layout}",
        marks=() if family in ALONE or (layout == "tp2-pp2-vpp2" and family not in LATER) else pytest.mark.slow,
    )
    for family in FAMILIES
    for layout in LAYOUTS
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Each family's reference, computed when first asked for."""
    made: dict[str, Reference] = {}

    def reference(family: str) -> Reference:
        if family not in made:
            build, images = FAMILIES[family]
            folder: Path = tmp_path_factory.mktemp(family) / "hf"
            made[family] = make_reference(build(), folder, images)
        return made[family]

    return reference


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_layouts_equal_transformers(
    pools: Pools, references: Callable[[str], Reference], family: str, layout: str
) -> None:
    world, flags = LAYOUTS[layout]
    assert_layout(pools, world, references(family), flags)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3-vl", "llava-onevision", "gemma3", "mistral3", "glm4v", "qwen2.5-vl-videos"),
        *(pytest.param(family, marks=pytest.mark.slow) for family in LATER),
    ],
)
def test_colocated_encoder_equals_transformers(
    pools: Pools, references: Callable[[str], Reference], family: str
) -> None:
    assert_layout(pools, 2, references(family), "--tp 2 --placement colocated")


def test_an_encoder_of_two_ranks_equals_transformers(pools: Pools, references: Callable[[str], Reference]) -> None:
    """Imported by slices; DeepStack's features go the encoder's way too."""
    assert_layout(pools, 2, references("qwen3-vl"), "--pp 2 --placement colocated --vision-tp 2")
