"""Ten faults, each found at its layer, and differences that rounding explains, which are none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.checkpoint.hf.adapters import table_in_memory
from megavlm.checkpoint.hf.hf_files import transformers_model
from megavlm.checkpoint.hf.importing import load_weights
from megavlm.config.schema import Config
from megavlm.inference.compare import Side, side_of, synthetic_batches
from megavlm.inference.parting import Model, beside_transformers, compared, first_parting
from megavlm.inference.single_process import full_model
from megavlm.programs import compare, convert
from tests.support import hf
from tests.support.covering import slow
from tests.support.tiny_models import FAMILIES, SINGLE
from tests.support.whole_models import whole_folder

SINGLE_PRECISION, HALF = torch.finfo(torch.float32).eps / 2, torch.finfo(torch.bfloat16).eps / 2


RECORDS = Path(__file__).parents[2] / "examples/first_run/train.jsonl"


class Folders:
    """Tiny models, loaded when first asked for."""

    def __init__(self, root: Path, single: Any) -> None:
        self._root, self._single, self._sides = root, single, dict[tuple[str, str], Side]()

    def side(self, family: str, precision: str = "fp32", change: Callable[[Any], Any] | None = None) -> Side:
        """Return the model of a family; with `change`, that of another configuration with the same weights."""
        folder, groups, backend = self._root / family, self._single.groups, self._single.backend
        if not folder.exists():
            hf.save(FAMILIES[family][0](), folder)
        if change is None:
            if (family, precision) not in self._sides:
                self._sides[family, precision] = side_of(folder, None, groups, backend, precision=precision)
            return self._sides[family, precision]
        right = self.side(family)
        config: Config = replace(right.config, model=change(right.config.model))
        chunk = full_model(config, groups, backend)
        assert right.pretrained is not None
        load_weights([chunk], [right.pretrained], right.config, vocab_size=right.config.model.language.vocab_size)
        return replace(right, config=config, chunk=chunk.eval())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, single: Any) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"), single)


def language(**options: Any) -> Callable[[Any], Any]:
    return lambda model: replace(model, language=replace(model.language, **options))


def vision(**options: Any) -> Callable[[Any], Any]:
    return lambda model: replace(model, vision=replace(model.vision, **options))


def swapped(value: Tensor, *, width: int = 1) -> Tensor:
    """Exchange the first two blocks of rows."""
    return torch.cat([value[width : 2 * width], value[:width], value[2 * width :]])


ATTENTION, EXPERTS = "language.layers.1.self_attention", "language.layers.1.mlp.experts"
WEIGHTS: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "transposed": ("llava", f"{ATTENTION}.linear_proj.weight", lambda w: w.T, f"{ATTENTION}.linear_proj"),
    "no bias": ("llava", "vision.layers.0.mlp.linear_fc1.bias", torch.zeros_like, "vision.layers.0.mlp.linear_fc1"),
    "heads": ("llava", f"{ATTENTION}.linear_qkv.weight", lambda w: swapped(w, width=8), f"{ATTENTION}.linear_qkv"),
    "position": ("llava", "patch_embed.position", lambda w: w.roll(1, 0), "patch_embed.norm"),
    "no scale": ("internvl", "vision.layers.1.mlp_bda.scale", torch.ones_like, "vision.layers.1"),
    "experts": ("internvl-moe", f"{EXPERTS}.linear_fc1.weight", swapped, f"{EXPERTS}.linear_fc1"),
    "vocabulary": ("llava", "output.linear.weight", swapped, "output"),
}
OPTIONS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "epsilon": ("llava", language(norm_epsilon=1e-4), "language.layers.0.input_layernorm"),
    "rope": ("llava", language(rotary_base=5e5), "language.layers.0.self_attention.core_attention"),
    "activation": ("llava", vision(activation="gelu"), "vision.layers.0.mlp.activation_func"),
    "embedding": ("llava", language(embedding_scale=2.0), "embedding"),
}


def _doubled(module: Any, gradients: Any) -> Any:
    return tuple(None if each is None else 2 * each for each in gradients)


def parting(a: Side, b: Side, **options: Any) -> str | None:
    batches = [(each, each) for each in synthetic_batches(a.config, 1, None)]
    rows = compared(Model(a.chunk, SINGLE_PRECISION), Model(b.chunk, SINGLE_PRECISION), batches, **options)
    return None if (row := first_parting(rows)) is None else row.name


@pytest.mark.parametrize("fault", WEIGHTS)
def test_a_wrong_weight_is_found_at_its_layer(folders: Folders, fault: str) -> None:
    family, key, change, where = WEIGHTS[fault]
    right, wrong = folders.side(family), folders.side(family, change=lambda model: model)
    [weight] = [param for name, param in wrong.chunk.named_parameters() if name == key]
    assert parting(right, wrong) is None
    with torch.no_grad():
        weight.copy_(change(weight.clone()))
    assert parting(right, wrong) == where


@pytest.mark.parametrize("fault", OPTIONS)
def test_a_wrong_option_is_found_at_its_layer(folders: Folders, fault: str) -> None:
    family, change, where = OPTIONS[fault]
    assert parting(folders.side(family), folders.side(family, change=change)) == where


def test_gradients_part_where_a_backward_pass_does(folders: Folders) -> None:
    right, wrong = folders.side("llava"), folders.side("llava", change=lambda model: model)
    assert parting(right, wrong, gradients=True) is None
    layer = wrong.chunk.parts["language.layers.0"]
    handle = layer.mlp.linear_fc2.register_full_backward_pre_hook(_doubled)
    assert parting(right, wrong, gradients=True) == "gradient of language.layers.0.mlp.linear_fc2.weight"
    handle.remove()


@pytest.mark.parametrize("family", ["llava", *(slow(name) for name in SINGLE if name != "llava")])
def test_rounding_is_no_parting(folders: Folders, family: str) -> None:
    """In bf16 as in fp32, and in Transformers as here."""
    right, half = folders.side(family), folders.side(family, "bf16")
    assert right.pretrained is not None
    batches = synthetic_batches(right.config, 2, right.pretrained.tiling)
    rows = compared(Model(right.chunk, HALF), Model(half.chunk, HALF), [(each, each) for each in batches])
    assert first_parting(rows) is None
    assert max(row.difference for row in rows) > 1e-4
    inputs, theirs = right.pretrained.family.inputs, transformers_model(right.pretrained.folder.path)
    assert inputs is not None
    table = table_in_memory(right.pretrained.family, right.config.model)
    pairs = [(each, inputs(each, right.config.model)) for each in batches]
    rows = beside_transformers(Model(right.chunk, SINGLE_PRECISION), theirs, table, pairs)
    assert first_parting(rows) is None
    assert {row.name.partition(".")[0] for row in rows} >= {"vision", "language"}, "both parts were compared"
    [norm] = [
        module for name, module in theirs.named_modules() if name.endswith(("language_model.norm", "text_model.norm"))
    ]
    with torch.no_grad():
        norm.weight.mul_(1.01)
    row = first_parting(beside_transformers(Model(right.chunk, SINGLE_PRECISION), theirs, table, pairs))
    assert row is not None
    assert row.name == "language.norm"


def test_the_command_says_where_two_folders_part(tmp_path: Path, single: Any, capsys: Any) -> None:
    """Of images with another mean, the inputs; of a run and its export in bf16, or in Transformers, nothing."""
    folder, _, _ = whole_folder("llava", tmp_path)
    run = hf.run_of(folder, tmp_path / "run", single, ["--objective", "simpo", "--datasets", "pairs.jsonl"])
    other, data = tmp_path / "other", str(RECORDS)
    assert convert.main(["export", str(run), str(tmp_path / "out")]) == 0
    shutil.copytree(folder, other)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    settings["image_mean"][0] += 0.1
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    assert compare.main([str(folder), str(other), data]) == 1
    assert "they part at inputs.patches " in capsys.readouterr().out
    assert compare.main([str(run), str(tmp_path / "out"), data, "--dtype", "fp32", "bf16", "--gradients"]) == 0
    assert compare.main([str(run), str(folder), data, "--transformers"]) == 0
    assert compare.main([str(run), str(folder), "--dtype", "fp32", "bf16", "fp16"]) == 2
