"""Families of Hugging Face checkpoints at every kind of layout, against Transformers itself."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from megavlm.checkpoint.hf import hf_files
from megavlm.errors import UserError
from tests.support.covering import slow
from tests.support.gates import EXPERT_LAYOUTS, LAYOUTS
from tests.support.hf_layout import Reference, References, assert_layout, assert_losses, assert_packed, compare, run_at
from tests.support.pool import Pools
from tests.support.quantized_folders import quantized_and_plain
from tests.support.tiny_models import FAMILIES, MIXTURES

# The fast set: families of unlike parts where all kinds of cuts meet (the others have their tables in one process),
# and those whose features take ways of their own with a colocated encoder.
UNLIKE = (
    *("llava", "smolvlm", "mistral3", "qwen2.5-vl-videos", "qwen3-vl", "qwen3.5", "exaone4.5", "minicpmv-4.7"),
    *("glm4v", "gemma4"),
)
COLOCATED = ("omni3-moe", "llava-onevision", "qwen2.5-vl-videos")
FAST = {
    *((family, "tp2-pp2-vpp2") for family in (*UNLIKE, "omni", "omni3-moe", "gemma4-unified")),
    *((family, "colocated") for family in COLOCATED),
    *(("text-qwen3", layout) for layout in ("tp2-pp2-vpp2", "cp2")),
    ("qwen3-vl-moe", "tp2-ep2"),
    ("glm4v-moe", "pp2-ep2"),
    ("gemma4-moe", "tp2-ep2"),
    *(("text-gpt-oss-moe", layout) for layout in ("tp2-pp2-vpp2", "cp2")),
    ("internvl-gpt-oss-moe", "tp2-ep2"),
}


def cases(layouts: Any, fast: set[tuple[str, str]]) -> list[Any]:
    """Return each family at each layout; those that are not `fast` are for `make test-all` and `make cards`."""
    return [
        pytest.param(
            family, layout, id=f"{family}-{layout}", marks=() if (family, layout) in fast else pytest.mark.slow
        )
        for family in FAMILIES
        for layout in [*layouts, *(EXPERT_LAYOUTS if family in MIXTURES else ())]
        if not (family in MIXTURES and layout == "zero3")  # which experts do not support
        if not (family.startswith("text-") and layout == "colocated")
    ]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp)


@pytest.mark.parametrize(("family", "layout"), cases([name for name in LAYOUTS if name != "zero3"], FAST))
def test_layouts_equal_transformers(pools: Pools, references: References, family: str, layout: str) -> None:
    assert_layout(pools, references(family), layout)


@pytest.mark.parametrize(("family", "layout"), cases(LAYOUTS, {("gemma4", "zero3"), ("text-qwen3", "zero3")}))
def test_five_steps_equal_transformers(pools: Pools, references: References, family: str, layout: str) -> None:
    assert_losses(pools, references(family), layout, references.losses(family))


@pytest.mark.parametrize("family", [slow(name) for name in FAMILIES])
def test_packed_samples_equal_transformers(pools: Pools, references: References, family: str) -> None:
    assert_packed(pools, references(family))


def test_an_encoder_of_two_ranks_equals_transformers(pools: Pools, references: References) -> None:
    """Imported by slices; DeepStack's features go the encoder's way too."""
    for worst in pools(2).run(compare, references("qwen3-vl"), "--pp 2 --placement colocated --vision-tp 2"):
        for what, difference in worst.items():
            assert difference < (1e-4 if what.startswith("logits") else 1e-3), f"{what}: {difference:.1e}"


def bytes_read(reference: Any, layout: str) -> int:
    """Return the bytes of weights that this rank reads when a run begins with the folder."""
    read_into, counted = hf_files.read_into, []

    def counting(descriptor: int, tensor: Any, offset: int) -> None:
        counted.append(tensor.numel() * tensor.element_size())
        read_into(descriptor, tensor, offset)

    with patch.object(hf_files, "read_into", counting), run_at(reference, layout):
        return sum(counted)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3-vl", "--tp 2"),
        slow("qwen3-vl", "--tp 4 --placement colocated"),
        ("qwen3-vl", "--data-parallel-sharding full"),
        ("glm4v-moe", "--tp 2 --ep 2"),
    ],
)
def test_ranks_read_each_byte_of_the_files_once(pools: Pools, references: References, family: str, layout: str) -> None:
    """Rows that copies need, or all tensor-parallel ranks, are read by one of them."""
    reference = references(family)
    there = sum(file.stat().st_size for file in reference.folder.glob("*.safetensors"))
    read = pools(4).run(bytes_read, reference, layout)
    assert sum(read) <= 1.1 * there, f"{read} of {there}"
    assert max(read) <= 0.6 * there, "the ranks share the work"


def refusal(reference: Any, layout: str) -> str:
    with pytest.raises(UserError) as refused, run_at(reference, layout):
        pass
    return str(refused.value)


def test_a_value_that_one_rank_reads_and_that_is_none_ends_all(pools, references, tmp_path):
    """While the others wait for what it reads."""
    folder = shutil.copytree(references("qwen3-vl").folder, tmp_path / "damaged")
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("layers.1.mlp.down_proj.weight"))
    weights[name][-1, -1] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    said = pools(4).run(refusal, replace(references("qwen3-vl"), folder=folder), "--tp 2")
    assert said == [f"{name} of {folder} has values that are NaN or infinite: copy {file.name} again"] * 4


def unlike(folders: Sequence[Path], layout: str) -> list[str]:
    """Return this rank's weights that differ by the folder."""
    held = []
    for folder in folders:
        with run_at(Reference("", folder, folder, folder, images=[[[]]]), layout) as run:
            held.append([(s.key, s.data.clone()) for chunk in run.engine.model_chunks for s in chunk.module.shards()])
    return [key for (key, one), (_, two) in zip(*held, strict=True) if not torch.equal(one, two)]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("fp8-blocks", "--tp 2"), ("fp8-transposed", "--ep 2"), ("fp8-tensors", "--tp 2"), ("fp8-rows", "--tp 2")),
        *(("int4", "--ep 2"), ("mxfp4", "--tp 2"), ("mxfp4", "--ep 2")),
    ],
)
def test_quantized_weights_are_those_that_they_stand_for(pools: Pools, tmp_path: Path, name: str, layout: str) -> None:
    assert pools(2).run(unlike, quantized_and_plain(name, tmp_path), layout) == [[], []]
