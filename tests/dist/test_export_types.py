"""Exports have the type of every tensor of the folder that the run began with, and what it did not train byte for byte.

A run computes in bf16 whatever the folder holds: what training has done to a weight is in the fp32 main weights, and a
weight that it only rounded is read from what the run keeps of the folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megavlm.checkpoint import folders
from megavlm.checkpoint.hf.checkpoint_reader import CheckpointReader
from megavlm.programs import convert
from tests.support import hf
from tests.support.pool import Pools
from tests.support.tiny_models import FAMILIES, square
from tests.support.training import train_composed

RUN = "--precision bf16 --seq-length 48 --gbs 2 --lr 1e-2 --lr-warmup-iters 0 --train-iters 2 --no-tensorboard".split()
TRAINED = "--freeze vision".split()
LORA = "--freeze vision projector --lora-rank 2 --lora-targets language --lora-alpha 8".split()
# What has tensors of several types in one weight of megavlm, too: the first language layer's queries, keys and values.
MIXED = {"vision": torch.float16, "language": torch.bfloat16, "projector": torch.float32, "q_proj": torch.float32}


def mixed(path: Path) -> Path:
    folder = hf.save(FAMILIES["llava"][0](), path)
    weights = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        weights[name] = value.to([each for part, each in MIXED.items() if part in name][-1])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_exports_keep_types_and_what_was_not_trained(pools: Pools, tmp_path: Path) -> None:
    folder = mixed(tmp_path / "hf")
    begun = load_file(folder / "model.safetensors")
    argv = [*RUN, "--image-sizes", square("llava"), "--init-from", str(folder)]
    pools(1).run(train_composed, [*argv, *TRAINED], str(tmp_path / "trained"))
    pools(1).run(train_composed, [*argv, *LORA], str(tmp_path / "adapted"))

    def written(command: str, run: str) -> dict[str, Tensor]:
        out = tmp_path / f"{run}-{command}"
        assert convert.main([command, str(tmp_path / run), str(out)]) == 0
        if command != "export-lora":
            assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
        (file,) = out.glob("*.safetensors")
        return load_file(file)

    trained = written("export", "trained")
    main = CheckpointReader(folders.resolve(tmp_path / "trained"))
    key = "embedding.word_embeddings.weight"
    rows = begun["language_model.model.embed_tokens.weight"].shape[0]
    moved = main.read(f"optimizer.state.param.{key}", 0, rows)
    assert not torch.equal(moved.bfloat16().float(), moved), "main weights hold more than bf16 does"
    assert torch.equal(
        trained["language_model.model.embed_tokens.weight"],
        moved.to(begun["language_model.model.embed_tokens.weight"].dtype),
    )
    assert_alike(trained, begun, frozen=("vision",))
    assert convert.main(["verify", str(tmp_path / "trained-export"), str(tmp_path / "trained")]) == 0

    merged, adapters = written("merge-lora", "adapted"), written("export-lora", "adapted")
    factors = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in adapters}
    assert_alike(merged, begun, frozen=("vision", "projector", "embed_tokens", "norm", "lm_head"))
    for module in factors:
        a, b = (adapters[f"base_model.model.{module}.lora_{each}.weight"] for each in "AB")
        name = f"{module.replace('model.language_model', 'language_model.model')}.weight"
        right = (begun[name].float() + 4 * b @ a).to(begun[name].dtype)
        torch.testing.assert_close(merged[name], right, rtol=torch.finfo(right.dtype).eps, atol=1e-8)
        assert not torch.equal(merged[name], begun[name])


def assert_alike(exported: dict[str, Tensor], begun: dict[str, Tensor], *, frozen: tuple[str, ...]) -> None:
    """Check names and types, and that tensors with one of these words in their names are as they were, others not."""
    assert {name: each.dtype for name, each in exported.items()} == {name: each.dtype for name, each in begun.items()}
    same = {name for name in begun if torch.equal(exported[name], begun[name])}
    assert same == {name for name in begun if any(word in name for word in frozen)}
