"""Families of Hugging Face checkpoints at every kind of layout, against Transformers itself."""

from __future__ import annotations

from typing import Any

import pytest

from megavlm.backend import activate
from tests.support.gates import EXPERT_LAYOUTS, LAYOUTS
from tests.support.pool import Pools

activate()  # before the modules below import megatron-core

from tests.support.hf_layout import References, assert_layout, assert_losses, assert_packed, compare  # noqa: E402
from tests.support.tiny_models import FAMILIES, MIXTURES  # noqa: E402

# The fast set: every family where all kinds of cuts meet, one at the layouts that tell which of them is at fault, and
# those whose features take ways of their own with a colocated encoder.
ALONE = ("qwen3-vl",)
LATER = ("qwen3-vl-videos", "llava-onevision-videos", "llava-tied", "llava-onevision-tied", "internvl-6b")
COLOCATED = ("qwen3-vl", "llava-onevision", "gemma3", "mistral3", "glm4v", "qwen2.5-vl-videos")
FAST = {
    *((family, layout) for family in ALONE for layout in ("tp2", "pp2")),
    *((family, "tp2-pp2-vpp2") for family in FAMILIES if family not in (*LATER, *MIXTURES)),
    *((family, "colocated") for family in COLOCATED),
    ("qwen3-vl-moe", "tp2-ep2"),
    ("glm4v-moe", "pp2-ep2"),
}


def cases(layouts: Any, fast: set[tuple[str, str]]) -> list[Any]:
    """Return each family at each layout; those that are not `fast` are for `make test-all` and `make cards`."""
    return [
        pytest.param(
            family,
            layout,
            id=f"{family}-{layout}",
            marks=() if (family, layout) in fast else pytest.mark.slow,
        )
        for family in FAMILIES
        for layout in [*layouts, *(EXPERT_LAYOUTS if family in MIXTURES else ())]
        if not (family in MIXTURES and layout == "zero3")  # which experts do not support
    ]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp)


@pytest.mark.parametrize(("family", "layout"), cases([name for name in LAYOUTS if name != "zero3"], FAST))
def test_layouts_equal_transformers(pools: Pools, references: References, family: str, layout: str) -> None:
    assert_layout(pools, references(family), layout)


@pytest.mark.parametrize(("family", "layout"), cases(LAYOUTS, {("qwen3-vl", "zero3"), ("gemma3", "tp2-dp2")}))
def test_five_steps_equal_transformers(pools: Pools, references: References, family: str, layout: str) -> None:
    assert_losses(pools, references(family), layout)


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_packed_samples_equal_transformers(pools: Pools, references: References, family: str) -> None:
    assert_packed(pools, references(family))


def test_an_encoder_of_two_ranks_equals_transformers(pools: Pools, references: References) -> None:
    """Imported by slices; DeepStack's features go the encoder's way too."""
    for worst in pools(2).run(compare, references("qwen3-vl"), "--pp 2 --placement colocated --vision-tp 2"):
        for what, difference in worst.items():
            assert difference < (1e-4 if what.startswith("logits") else 1e-3), f"{what}: {difference:.1e}"
