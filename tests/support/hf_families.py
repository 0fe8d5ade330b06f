"""Tiny models of every family of Hugging Face, and the images of their micro-batches, for layouts and whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from tests.support.hf_layout import Reference, make_reference
from tests.support.tiny_models import (
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
    "qwen3-vl-moe": (qwen_vl.qwen3_moe, SIZES),
    "internvl-moe": (lambda: transformers.InternVLForConditionalGeneration(internvl.mixture()), IMAGES),
    "glm4v-moe": (glm4v.glm4v_moe, SIZES),
    "qwen3-vl-videos": (qwen_vl.qwen3, (*qwen_vl.VIDEOS, qwen_vl.IMAGES[1])),
}
MIXTURES = [name for name in FAMILIES if name.endswith("-moe")]
# One model of each family, and InternVL's mixture of experts.
SINGLE = [name for name in FAMILIES if not name.endswith(("-tied", "-6b", "-videos"))]


def square(name: str) -> str:
    """Return the side of the first square image of a family, for synthetic images that its model can take."""
    return str(next(size[0] for batch in FAMILIES[name][1] for sizes in batch for size in sizes if len({*size}) == 1))


class References:
    """Each family's reference, computed when first asked for."""

    def __init__(self, root: Callable[[str], Path]) -> None:
        """`root` makes an empty folder with a name."""
        self._root = root
        self._made: dict[str, Reference] = {}

    def __call__(self, name: str) -> Reference:
        if name not in self._made:
            build, images = FAMILIES[name]
            self._made[name] = make_reference(build(), self._root(name) / "hf", images)
        return self._made[name]
