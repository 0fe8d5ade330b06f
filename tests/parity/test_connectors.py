"""Connectors and those of Transformers: the same features and gradients from the weights of the same folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from megavlm.arch.connector import connector_of
from megavlm.arch.layers import PROJECTOR
from megavlm.checkpoint.hf.importing import load_weights
from megavlm.checkpoint.hf.pretrained import pretrained_of, with_pretrained_model
from megavlm.command_line.parsing import parse
from megavlm.errors import UserError
from megavlm.model.vision import VisionLayout
from megavlm.rules.defaults import resolve
from tests.support.flags import resolved
from tests.support.harness import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, Single, assert_same, randomize

GRIDS = ((2, 3), (4, 4), (4, 4), (1, 5))
WIDTH, OUTPUTS = 20, 24
SIZES = (
    f"--set model.vision.hidden_size={WIDTH} model.vision.num_attention_heads=2 model.vision.patch_size=4 "
    f"model.vision.image_size=16 model.language.hidden_size={OUTPUTS} model.language.num_attention_heads=2 "
    "model.language.vocab_size=97"
).split()

QFORMER: dict[str, Any] = {
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 26,
    "encoder_hidden_size": WIDTH,
    "layer_norm_eps": 1e-5,
}


def bare_qformer() -> transformers.PreTrainedModel:
    return transformers.Blip2QFormerModel(transformers.Blip2QFormerConfig(**QFORMER))


def whole_blip2() -> transformers.PreTrainedModel:
    vision = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"model_type": "opt", "hidden_size": OUTPUTS, "ffn_dim": 24, "num_hidden_layers": 1, "vocab_size": 50}
    text |= {"num_attention_heads": 2, "word_embed_proj_dim": OUTPUTS, "max_position_embeddings": 32}
    config = transformers.Blip2Config(
        vision_config={**vision, "image_size": 8, "patch_size": 4},
        qformer_config=QFORMER,
        text_config=text,
        num_query_tokens=5,
        image_text_hidden_size=8,
    )
    return transformers.Blip2ForConditionalGeneration(config)


def of_qformer(theirs: Any, ours: dict[str, Tensor], patches: Tensor) -> Tensor:
    """Their features of one image, with our queries and projection."""
    inner = getattr(theirs, "qformer", None) or getattr(getattr(theirs, "model", None), "qformer", theirs)
    out = inner(query_embeds=ours["queries"][None], encoder_hidden_states=patches[None]).last_hidden_state
    return torch.nn.functional.linear(out[0], ours["projection.weight"], ours["projection.bias"])


PERCEIVER: dict[str, Any] = {
    "hidden_size": OUTPUTS,
    "resampler_n_latents": 5,
    "resampler_depth": 2,
    "resampler_n_heads": 6,
    "resampler_head_dim": 4,
    "num_key_value_heads": 3,
}


def bare_perceiver() -> transformers.PreTrainedModel:
    from transformers.models.idefics2.modeling_idefics2 import Idefics2PerceiverConfig, Idefics2PerceiverResampler

    return Idefics2PerceiverResampler(Idefics2PerceiverConfig(**PERCEIVER))


def whole_idefics2() -> transformers.PreTrainedModel:
    vision = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"model_type": "mistral", "hidden_size": OUTPUTS, "intermediate_size": 31, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 50, "pad_token_id": 0}
    config = transformers.Idefics2Config(
        vision_config={**vision, "image_size": 8, "patch_size": 4},
        perceiver_config=PERCEIVER,
        text_config=text,
        image_token_id=7,
    )
    return transformers.Idefics2ForConditionalGeneration(config)


def of_perceiver(theirs: Any, ours: dict[str, Tensor], patches: Tensor) -> Tensor:
    """Their features of one image, with our projection."""
    gate, up, down = (ours[f"projection.{name}.weight"] for name in ("gate", "up", "fc2"))
    linear = torch.nn.functional.linear
    projected = linear(torch.nn.functional.silu(linear(patches, gate)) * linear(patches, up), down)
    mask = torch.ones(1, len(patches), dtype=torch.long)
    return theirs(context=projected[None], attention_mask=mask)[0]


def of_idefics2(theirs: Any, ours: dict[str, Tensor], patches: Tensor) -> Tensor:
    mask = torch.ones(1, len(patches), dtype=torch.long)
    return theirs.model.connector(patches[None], mask)[0]


Features = Callable[[Any, dict[str, Tensor], Tensor], Tensor]
CASES: dict[str, tuple[Callable[[], Any], str, Features]] = {
    "qformer": (bare_qformer, "--set model.projector.connectors.qformer.num_queries=5", of_qformer),
    "perceiver": (bare_perceiver, "", of_perceiver),
    "idefics2": (whole_idefics2, "", of_idefics2),
    "blip-2": (whole_blip2, "", of_qformer),
}


@pytest.mark.parametrize("name", CASES)
def test_features_and_gradients_are_those_of_transformers(single: Single, name: str, tmp_path: Path) -> None:
    build, flags, features = CASES[name]
    theirs = randomize(build(), seed=1)
    theirs.save_pretrained(tmp_path)
    config = resolve(with_pretrained_model(parse([*SIZES, *flags.split(), "--projector-from", str(tmp_path)])))
    chunk = single.chunk(config, (PROJECTOR,), vocab_size=97)
    load_weights([chunk], pretrained_of(config), config, vocab_size=97)
    part: Any = chunk.parts[PROJECTOR]
    count = sum(rows * columns for rows, columns in GRIDS)
    patches = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True)
    layout = VisionLayout.of(GRIDS, class_token=False, multiple=1, blank=(1, 1))
    mine = part(patches[:, None], layout, tile_groups=(), sequence_parallel=False)[:, 0]
    ours = dict(part.named_parameters())
    lengths = [rows * columns for rows, columns in GRIDS]
    wanted = torch.cat([features(theirs, ours, each) for each in patches.split(lengths)])
    assert_same(mine, wanted, tolerance=OUTPUT_TOLERANCE, what="features")
    toward = torch.randn(mine.shape, generator=torch.Generator().manual_seed(3))
    gradients = [torch.autograd.grad((each * toward).sum(), patches)[0] for each in (mine, wanted)]
    assert_same(gradients[0], gradients[1], tolerance=GRADIENT_TOLERANCE, what="gradient of the patches")


def test_a_folder_decides_and_contradictions_are_one_line(tmp_path: Path) -> None:
    bare_qformer().save_pretrained(tmp_path)
    argv = [*SIZES, "--projector-from", str(tmp_path)]
    found = with_pretrained_model(
        parse([*argv, "--set", "model.projector.connectors.qformer.num_queries=7"])
    ).model.projector
    assert (found.kind, found.connectors.qformer.num_queries, found.connectors.qformer.num_layers) == ("qformer", 7, 3)
    with pytest.raises(
        UserError,
        match=r"model.projector.connectors.qformer.num_layers 4 contradicts .*, which has 3: leave it out",
    ):
        with_pretrained_model(parse([*argv, "--set", "model.projector.connectors.qformer.num_layers=4"]))
    with pytest.raises(UserError, match=r"--projector-kind gated contradicts .*, which has qformer"):
        with_pretrained_model(parse([*argv, "--projector-kind", "gated"]))
    with pytest.raises(UserError, match=r"--init-from brings a whole VLM: leave out .* --projector-from"):
        with_pretrained_model(parse([*argv, "--init-from", str(tmp_path)]))


def test_the_folder_of_an_mlp_decides_its_options(tmp_path: Path) -> None:
    """They are the projector's own, whatever else a folder says."""
    said = {"kind": "linear", "pixel_shuffle": 2, "hidden_size": 20, "bias": False}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "megavlm_mlp", "megavlm": said}))
    save_file({"linear_fc1.weight": torch.zeros(20, 80)}, tmp_path / "model.safetensors")
    argv = [*SIZES, "--projector-from", str(tmp_path)]
    found = with_pretrained_model(parse(argv)).model.projector
    assert (found.kind, found.pixel_shuffle, found.hidden_size, found.bias) == ("mlp", 2, 20, False)
    with pytest.raises(UserError, match=r"model.projector.pixel_shuffle 4 contradicts .*, which has 2: leave it out"):
        with_pretrained_model(parse([*argv, "--set", "model.projector.pixel_shuffle=4"]))


def test_a_tower_with_mergers_inside_has_no_export_of_its_projector() -> None:
    model = resolved([*SIZES, "--set", "model.projector.pixel_shuffle=2"]).model
    assert connector_of(model.projector).exported(model) == 0
    tapped = replace(model, vision=replace(model.vision, deepstack_layers=(0,)))
    assert connector_of(model.projector).exported(tapped) is None


@pytest.mark.parametrize(
    ("kind", "section", "says"),
    [
        ("c_abstractor", "many", "megavlm"),
        ("c_abstractor", {"depht": 1}, "depth"),
        ("c_abstractor", {"depth": "x"}, "depth"),
        ("c_abstractor", {"depth": 0}, "depth 0 must be at least 1"),
        ("c_abstractor", {"norm_epsilon": -1.0}, "norm_epsilon"),
        (
            "c_abstractor",
            {"hidden_size": 10**12},
            "hidden_size 1000000000000 is described, and no tensor is larger than",
        ),
        ("gated", {"pixel_shuffle": "two"}, "pixel_shuffle"),
        ("gated", {"connectors": {}}, "has no connectors"),
        ("linear", {"merge": "cut"}, "merge"),
    ],
)
def test_a_damaged_export_is_one_line(tmp_path: Path, kind: str, section: object, says: str) -> None:
    config = {"model_type": f"megavlm_{kind}", "megavlm": section}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"positions": torch.zeros(16, 20)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=says) as caught:
        with_pretrained_model(parse([*SIZES, "--projector-from", str(tmp_path)]))
    assert len(str(caught.value).splitlines()) == 1
