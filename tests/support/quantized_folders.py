"""Hugging Face folders of quantized weights, beside folders of the bf16 weights that they stand for.

Numbers and scales are drawn, and multiplied block by block here; MXFP4 is dequantized by Transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support import hf
from tests.support.tiny_models import tiny

Parts = tuple[dict[str, Tensor], Tensor]  # what files hold, by the ends of names, and the weight

BLOCK = (20, 12)  # divides few of the sizes


def _scaled(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the product of the numbers of each block with its scale, in bf16."""
    out = torch.empty(numbers.shape)
    for row, column in product(range(scales.shape[-2]), range(scales.shape[-1])):
        rows = slice(row * block[0], (row + 1) * block[0])
        columns = slice(column * block[1], (column + 1) * block[1])
        out[..., rows, columns] = numbers[..., rows, columns].float() * scales[..., row, column, None, None].float()
    return out.bfloat16()


def _drawn(*shape: int) -> Tensor:
    return torch.rand(shape) / 10 + 0.01


def _fp8(like: Tensor, block: tuple[int, int], scales: Tensor) -> tuple[Tensor, Tensor]:
    numbers = torch.randn(like.shape).to(torch.float8_e4m3fn)
    return numbers, _scaled(numbers, scales, block)


def _blocks(like: Tensor) -> Parts:
    scales = _drawn(*like.shape[:-2], *(-(-size // side) for size, side in zip(like.shape[-2:], BLOCK, strict=True)))
    numbers, weight = _fp8(like, BLOCK, scales)
    return {"": numbers, "_scale_inv": scales}, weight


def _whole(like: Tensor) -> Parts:
    scale = _drawn().bfloat16()
    numbers, weight = _fp8(like, tuple(like.shape), scale.view(1, 1))  # type: ignore[arg-type]
    return {"": numbers, "_scale_inv": scale, ".activation_scale": torch.ones(())}, weight


def _rows(like: Tensor) -> Parts:
    scales = _drawn(len(like), 1).bfloat16()
    numbers, weight = _fp8(like, (1, like.shape[1]), scales)
    return {"": numbers, "_scale": scales}, weight


def _int4(like: Tensor) -> Parts:
    rows, columns = like.shape
    numbers, scales = torch.randint(-8, 8, like.shape), _drawn(rows, columns // 8).bfloat16()
    packed = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for place in range(8):
        packed += (numbers[:, place::8] + 8) << 4 * place
    held = {"_packed": packed.to(torch.int32), "_scale": scales, "_shape": torch.tensor([rows, columns])}
    return held, _scaled(numbers, scales, (1, 8))


def _mxfp4(like: Tensor) -> Parts:
    experts, columns, rows = like.shape
    numbers = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(118, 125, numbers.shape[:-1], dtype=torch.uint8)
    return {"_blocks": numbers, "_scales": scales}, convert_moe_packed_tensors(numbers, scales)


def _compressed(how: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}}
    return {"quant_method": "compressed-tensors", "format": how, "config_groups": groups}


KINDS: dict[str, tuple[Callable[[Tensor], Parts], dict[str, Any]]] = {
    "FP8 blocks": (_blocks, {"quant_method": "fp8", "weight_block_size": list(BLOCK)}),
    "FP8 tensors": (_whole, {"quant_method": "fp8", "weight_block_size": None}),
    "FP8 rows": (_rows, _compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "INT4": (_int4, _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8)),
    "MXFP4": (_mxfp4, {"quant_method": "mxfp4"}),
}


GPT_OSS = {"hidden_size": 64, "intermediate_size": 96}  # two blocks of MXFP4, and three
# Kind, model and its sizes: FP8 of all matrices, of transposed experts, of rows; INT4 and MXFP4 of experts.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp8-blocks": ("FP8 blocks", "qwen3-vl", {}),
    "fp8-transposed": ("FP8 blocks", "qwen3-vl-moe", {}),
    "fp8-tensors": ("FP8 tensors", "ministral3-tied", {}),
    "fp8-rows": ("FP8 rows", "glm4v-moe", {}),
    "int4": ("INT4", "kimi-moe", {}),
    "mxfp4": ("MXFP4", "text-gpt-oss-moe", GPT_OSS),
}


def quantized_and_plain(name: str, root: Path) -> tuple[Path, Path]:
    """Write `root`/quantized and `root`/plain, one of MODELS with drawn weights in its experts or, without some, in its
    language layers.
    """
    kind, model, sizes = MODELS[name]
    make, said = KINDS[kind]
    folder = hf.save(tiny(model, **sizes), root / "hf")
    torch.manual_seed(7)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    chosen = [name for name in weights if ".experts." in name and not name.endswith("_bias")]
    chosen = chosen or [name for name in weights if re.search(r"language_model.*_proj\.weight", name)]
    quantized, plain = dict(weights), dict(weights)
    for each in chosen:
        held, plain[each] = make(quantized.pop(each))
        quantized |= {each + end if end[:1] != "." else each.removesuffix(".weight") + end: held[end] for end in held}
    for path, tensors in ((root / "quantized", quantized), (root / "plain", plain)):
        shutil.copytree(folder, path, ignore=shutil.ignore_patterns("*.safetensors"))
        _save(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["quantization_config"] = said
    (root / "quantized/config.json").write_text(json.dumps(config))
    return root / "quantized", root / "plain"


def _save(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write two files and their index; numbers and scales are in different files."""
    files = {name: f"model-0000{1 + (('.1.' in name) != ('_scale' in name))}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        held = {name: tensor.contiguous() for name, tensor in tensors.items() if files[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
