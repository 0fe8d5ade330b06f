"""Towers, parts of models, adapters, further tokens, and models cut or parted: as in Transformers and PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils import transformers_weight_conversion
from torch import Tensor
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.internvl import InternVLVisionConfig, InternVLVisionModel

from megavlm.arch.image_tokens import grid_of
from megavlm.arch.layers import PROJECTOR, layer_names, part_of
from megavlm.arch.plan import Plan
from megavlm.checkpoint.hf.adapters import (
    PREFIX,
    factors_of_experts,
    grouped,
    peft_adapters,
    table_in_memory,
    write_adapters,
)
from megavlm.checkpoint.hf.hf_files import transformers_model
from megavlm.checkpoint.hf.importing import load_weights
from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained, with_pretrained_model
from megavlm.command_line.parsing import parse
from megavlm.config.lora_config import all_names
from megavlm.config.schema import CheckpointConfig, Config, LoraConfig
from megavlm.inference.compare import Side, side_of, synthetic_batches
from megavlm.inference.parting import Model, beside_transformers, compared, first_parting
from megavlm.inference.single_process import full_model
from megavlm.inputs.batch import ImageBatch, ImageSizes, MicroBatch
from megavlm.inputs.patches import patchify
from megavlm.model.masks import image_runs, masked_spans
from megavlm.model.router import Router
from megavlm.model.vlm import VLMChunk
from megavlm.model.weights import initialize
from megavlm.pipeline.schedule import pipeline_config
from megavlm.programs import compare, convert
from megavlm.rules.defaults import resolve
from megavlm.train.engine import Engine
from tests.support import hf
from tests.support.covering import fast_and_slow, slow
from tests.support.flags import resolved
from tests.support.gates import hold
from tests.support.harness import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, Single, assert_same, difference, random_image
from tests.support.peft_blocks import trained_entries, with_one_a
from tests.support.predictors import losses_of, with_predictor
from tests.support.tiny_models import FAMILIES, SINGLE, TEXT, TOWER, VIDEOS, images_of, tiny
from tests.support.whole_models import whole_folder

SEEING = {**TOWER, "attn_implementation": "eager"}
INTERN = {**SEEING, "image_size": [32, 32], "patch_size": [8, 8]}
TOWERS = {
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SEEING, hidden_act="quick_gelu")),
    # A last norm, which features of a whole InternVL do not pass.
    "internvit-300m": lambda: InternVLVisionModel(
        InternVLVisionConfig(
            **INTERN,
            **{"norm_type": "layer_norm", "attention_bias": True, "use_mean_pooling": False},
            tie_last_hidden_states=True,
        )
    ),
}


def ours_of(theirs: Any, single: Single, root: Path) -> tuple[Any, Any, Pretrained]:
    """Return a chunk of a tower's layers with the weights of a folder, its configuration, and the folder."""
    folder = hf.save(theirs, root / "hf")
    language = hf.save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)), root / "other")
    argv = ["--vision-from", str(folder), "--language-from", str(language), "--image-token", "60"]
    config = resolve(with_pretrained_model(parse([*argv, "--precision", "fp32"])))
    names = layer_names(config.model)
    chunk = single.chunk(config, names[: names.index(PROJECTOR)], vocab_size=61)
    pretrained = Pretrained.of(folder, "vision")
    load_weights([chunk], [pretrained], config, vocab_size=61)
    return chunk, config, pretrained


def assert_alike(ours: Tensor, theirs: Tensor, chunk: Any, config: Any, pretrained: Pretrained, model: Any) -> None:
    """Outputs, and the gradient of every parameter in a random direction, are those of Transformers."""
    family = pretrained.family.name
    assert_same(ours, theirs, tolerance=OUTPUT_TOLERANCE, what="outputs")
    hold(family, "logits", difference(ours, theirs, "outputs"))
    direction = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(4))
    (ours * direction).sum().backward()
    (theirs * direction).sum().backward()
    gradients = Pretrained.of(hf.save_gradients(model, pretrained.folder.path / "gradients"), *pretrained.parts)
    shapes, found = hf.unpadded_shapes(chunk, config), hf.gradients_of(chunk)
    hf.assert_same_gradients(found, gradients, shapes, family, "gradients", tolerance=GRADIENT_TOLERANCE)


@pytest.mark.parametrize(("name", "height", "width"), [("internvit-300m", 32, 32), ("clip", 48, 48), ("clip", 24, 56)])
def test_a_tower_equals_transformers(name: str, height: int, width: int, single: Single, tmp_path: Path) -> None:
    """Images of other sizes than the tower's have interpolated positions."""
    model = TOWERS[name]()
    chunk, config, pretrained = ours_of(model, single, tmp_path)
    images = [random_image(height, width, seed=seed) for seed in (2, 3)]
    sizes = ImageSizes((grid_of(height, width, 8),) * 2)
    patches = torch.cat([patchify(image, 8) for image in images])
    features = chunk(MicroBatch.of_images(ImageBatch(sizes, patches)))[:, 0].unflatten(0, (2, -1))
    pixels = (torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    options = {} if (height, width) == (32, 32) else {"interpolate_pos_encoding": True}
    expected = model(pixels, output_hidden_states=True, **options).hidden_states[config.model.vision.feature_layer]
    expected = expected[:, expected.shape[1] - features.shape[1] :]
    assert_alike(features, expected, chunk, config, pretrained, model)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6), st.integers(1, 2)), min_size=1), st.integers(1, 9))
def test_images_frames_and_windows_mask_as_in_transformers(parts: list[tuple[int, int, int]], window: int) -> None:
    """Of Gemma 4: after some words an image or a frame, of which some attend both ways within the window alone."""
    kinds = torch.tensor([kind for words, features, own in parts for kind in [0] * words + [own] * features])[None]
    text = transformers.Gemma4TextConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=window
    )
    text._attn_implementation = "eager"
    inputs = (torch.zeros(*kinds.shape, 1), None, None, torch.arange(kinds.numel())[None])
    blocks = modeling_gemma4.get_block_sequence_ids_for_mask(kinds, device=kinds.device)
    theirs = modeling_gemma4.create_masks_for_vision_model(text, *inputs, blocks)
    counts, bounds = [features for _, features, _ in parts if features] or [0], [0, kinds.numel()]
    spans_of = partial(masked_spans, bounds, longest=max(counts), step=5, device=kinds.device, dtype=torch.float32)
    runs = image_runs(kinds, 1, counts, 2)
    spans = {
        "sliding_attention": spans_of(window=window, runs=runs),
        "full_attention": spans_of(window=None, runs=None),
    }
    for name, found in spans.items():
        ours = torch.zeros(kinds.numel(), kinds.numel(), dtype=torch.bool)
        for span in found:
            ours[span.queries, span.keys] = span.mask == 0
        assert torch.equal(ours, theirs[name][0, 0] == 0), name


FAST = ("internvl", "qwen2.5-vl")


# An audio encoder is in no composition.
@pytest.mark.parametrize("name", fast_and_slow(FAST, [name for name in SINGLE if not name.startswith("omni")]))
def test_a_part_has_the_names_of_its_folder(name: str, tmp_path: Path) -> None:
    """An export in parts asks a folder's family for the names of a model of which the folder has one part."""
    whole = hf.save(FAMILIES[name][0](), tmp_path / "whole")
    tower = hf.save(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER)), tmp_path / "tower")
    text = hf.save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)), tmp_path / "text")
    for part, sources in (("vision", (whole, text)), ("language", (tower, whole))):
        vision, language = map(str, sources)
        given = Config(checkpoint=CheckpointConfig(vision_from=vision, language_from=language))
        model = replace(given.model, image_token=60, projector=replace(given.model.projector, kind="qformer"))
        config = resolve(with_pretrained_model(replace(given, model=model)))
        found = Pretrained.of(whole, part)
        names = found.family.table(config.model, found.family.name_prefixes[found.variant])
        ours, theirs = ({key: each[key] for key in each if part_of(key) == part} for each in (names, found.table))
        assert ours == theirs
        assert len(ours) > 5


PREDICTING = ("--set", "model.language.mtp_layers=1", "model.objective.mtp_loss_scaling_factor=0.3")
PREDICT = ("qwen3.5", "glm4v-moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3.5-moe",)))


@pytest.mark.parametrize("name", PREDICT)
def test_loss_gradients_and_files(name: str, single: Single, tmp_path: Path) -> None:
    """The input of a layer that predicts further tokens has image features too, one position further on."""
    theirs = with_predictor(tiny(name))
    folder = hf.save(theirs, tmp_path / "hf")
    config = hf.config_for(folder, flags=PREDICTING)
    engine = hf.engine_for(config, folder, single)
    chunk = engine.chunks[0].module
    shapes = hf.unpadded_shapes(chunk, config)
    for number, images in enumerate(images_of(name)):
        given = hf.batch_of(config, images, seed=number)
        loss, further = losses_of(theirs, folder, given, config)
        theirs.zero_grad()
        tokens = float(given.text.loss_mask.sum())
        ((loss + 0.3 * further) / tokens).backward()
        engine.optimizer.zero_grad()
        found, counted, beside = engine.schedule.train([given]).tolist()
        assert counted == tokens
        assert found == pytest.approx(loss.item(), rel=1e-6)
        assert beside == pytest.approx(further.item(), rel=1e-6)
        gradients = Pretrained.of(hf.save_gradients(theirs, tmp_path / f"gradients{number}"), *ALL_PARTS, predictors=1)
        ours = hf.gradients_of(chunk, tokens)
        hf.assert_same_gradients(ours, gradients, shapes, "further", "gradients", tolerance=1e-4)
    hf.assert_round_trip(folder, tmp_path, single, flags=PREDICTING)


def lora_run(folder: Path, single: Single, dropout: float) -> tuple[Config, Engine]:
    """An engine whose adapters are no longer at their start, where B is zero and A has no gradient."""
    config = hf.config_for(folder)
    others = {"audio": config.model.audio.num_layers, "experts": config.model.experts.num_experts}
    targets = ("language", "vision", *(name for name, count in others.items() if count))
    lora = LoraConfig(rank=3, alpha=6.0, dropout=dropout, targets=targets)
    frozen = ("projector",) if config.model.vision.num_layers else ("vision", "projector")
    config = replace(config, lora=lora, model=replace(config.model, freeze=frozen))
    engine = hf.engine_for(config, folder, single)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in trained(engine).values():
            param.copy_(0.2 * torch.randn(param.shape, generator=generator))
    return config, engine


def trained(engine: Engine) -> dict[str, Any]:
    """Trained parameters by the names that checkpoints give them."""
    return {
        name.replace(".mlp.experts.", ".mlp.experts.experts."): param
        for name, param in engine.chunks[0].module.named_parameters()
        if param.requires_grad
    }


def every_other_channel(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout whose mask both sides know, whatever the order of their dimensions."""
    if not training or not p:
        return x
    return x * (torch.arange(x.shape[-1]) % 2) / (1 - p)


@pytest.mark.parametrize(
    ("family", "dropout"),
    [
        *(("gemma4", 0.0), ("llava", 0.5)),
        *(slow(name, 0.0) for name in SINGLE if name not in ("gemma4", "internvl-gpt-oss-moe")),  # without experts'
    ],
)
def test_gradients_are_pefts(family, dropout, single, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "dropout", every_other_channel)
    # PEFT takes adapters of any MLP of GLM-4.5V for adapters of its experts, and export-lora refuses them.
    monkeypatch.setattr(transformers_weight_conversion, "_MOE_TARGET_MODULE_MAPPING", {})
    build, (images, *_) = FAMILIES[family]
    base = build()
    folder = hf.save(base, tmp_path / "hf")
    config, engine = lora_run(folder, single, dropout)
    pretrained = Pretrained.of(folder, *ALL_PARTS)
    table = table_in_memory(pretrained.family, config.model)
    held = grouped(trained(engine), config.model)
    adapted = sum(len(adapters.pairs) for key, adapters in held.items() if key.startswith("language."))
    assert adapted == sum(name.startswith("language.") for name in all_names(config))
    write_adapters(*peft_adapters(held, table, config.lora), tmp_path / "adapters")
    theirs = with_one_a(peft.PeftModel.from_pretrained(base, tmp_path / "adapters", is_trainable=True)).train()

    given = hf.batch_of(config, images)
    loss, _ = hf.loss_of(theirs, pretrained, given, config)
    loss.backward()
    engine.optimizer.zero_grad()
    loss_sum, tokens = engine.schedule.train([given]).tolist()
    assert loss_sum / tokens == pytest.approx(loss.item(), rel=1e-5)

    gradients = grouped({name: param.main_grad / tokens for name, param in trained(engine).items()}, config.model)
    expected = {name: param.grad for name, param in theirs.named_parameters() if param.requires_grad}
    of_experts = factors_of_experts(gradients, table).values()
    for name, ours in (each for factors in of_experts for each in factors.items()):
        wanted = expected.pop(name.replace(".weight", ".default.weight"))
        assert wanted.abs().max() > 1e-7, f"{name} has no gradient to compare"
        hold(pretrained.family.name, "lora_gradients", difference(ours, wanted, name), f"gradient of {name}")
    for key, adapters in gradients.items():
        if adapters.of_experts is not None:
            continue
        for weight, pair in adapters.by_hf_name(table[key]).items():
            for letter, ours in zip("AB", pair, strict=True):
                name = f"{PREFIX}{weight.removesuffix('.weight')}.lora_{letter}.default.weight"
                if name.endswith(".self_attn.gate_proj.lora_A.default.weight"):  # which is that of queries
                    continue
                wanted = expected.pop(name)
                wanted = wanted * trained_entries(name, wanted, config) if letter == "B" else wanted
                assert wanted.abs().max() > 1e-7, f"{name} has no gradient to compare"
                hold(pretrained.family.name, "lora_gradients", difference(ours, wanted, name), f"gradient of {name}")
    assert not expected, "adapters of PEFT's that ours lack"


def test_dropout_acts_in_training_only(single: Single, tmp_path: Path) -> None:
    folder = hf.save(tiny("llava"), tmp_path / "hf")
    losses, evaluated = {}, {}
    for dropout in (0.0, 0.3):
        config, engine = lora_run(folder, single, dropout)
        given = hf.batch_of(config)
        losses[dropout] = [engine.schedule.train([given])[0].item() for _ in range(3)]
        with engine.evaluation():
            evaluated[dropout] = engine.schedule.logits([given])[0]
    assert len(set(losses[0.0])) == 1
    assert len({losses[0.0][0], *losses[0.3]}) == 4, "each step draws another mask"
    assert evaluated[0.0].equal(evaluated[0.3])


def test_dropout_keeps_the_mean(single: Single, tmp_path: Path) -> None:
    _, engine = lora_run(hf.save(tiny("llava"), tmp_path / "hf"), single, 0.3)
    layer = engine.chunks[0].module.get_submodule("language.layers.0.self_attention.linear_qkv.lora").train()
    ones = torch.ones(1000, 100)
    for differs in (False, True):
        dropped: Any = layer.drop(ones, differs=differs)  # type: ignore[operator]
        assert dropped.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
        # The share of 100,000 that is dropped: its standard deviation is 0.0014.
        assert (dropped == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)


VOCABULARY = 61
FLAGS = (
    "--set model.vision.num_layers=4 model.vision.hidden_size=24 model.vision.ffn_hidden_size=32 "
    "model.vision.num_attention_heads=3 model.vision.patch_size=4 model.vision.temporal_patch_size=2 "
    "model.vision.position_embedding=learned_rope2d model.vision.position_interpolation=bilinear "
    "model.vision.deepstack_layers=[0,2] model.projector.hidden_size=96 model.projector.pixel_shuffle=2 "
    "model.language.num_layers=3 model.language.hidden_size=32 model.language.ffn_hidden_size=48 "
    f"model.language.num_attention_heads=4 model.language.vocab_size={VOCABULARY} model.language.mrope_section=[2,1,1] "
    f"model.language.mrope_interleaved=true --image-token 60 --seq-length {hf.LENGTH} --freeze"
).split()
IMAGES = [[(8, 16), (24, 8)], []]


def chunks_of(config: Config, single: Single, *cuts: int) -> list[VLMChunk]:
    names = layer_names(config.model)
    bounds = (0, *cuts, len(names))
    parts = tuple(names[start:end] for start, end in pairwise(bounds))
    plan = Plan(dims=single.groups.dims, chunks=parts)
    pipeline = pipeline_config(config, plan.dims)
    chunks = [
        VLMChunk(config, plan, index, vocab_size=VOCABULARY, groups=single.groups, pipeline=pipeline)
        for index in range(len(parts))
    ]
    for chunk in chunks:
        initialize(chunk, config, vocab_size=VOCABULARY)
    return chunks


def run(chunks: list[VLMChunk], batch: MicroBatch) -> dict[str, Tensor]:
    """The loss and every gradient, as the pipeline's schedule makes them."""
    sent: list[tuple[Tensor, Tensor]] = []  # what each chunk put out, and the next one's copy of it
    output: Any = None
    for chunk in chunks:
        if output is not None:
            sent.append((output, output.detach().requires_grad_()))
            chunk.set_input_tensor(sent[-1][1])
        output = chunk(batch)
    loss = (output * batch.text.loss_mask).sum()
    loss.backward()
    for output, received in reversed(sent):
        if output.requires_grad:
            output.backward(received.grad)
    named = [pair for chunk in chunks for pair in chunk.named_parameters()]
    return {"loss": loss.detach(), **{name: param.grad for name, param in named if param.grad is not None}}


@pytest.mark.parametrize("freeze", [(), ("vision",), ("vision", "projector")])
def test_every_cut_gives_the_same_numbers(freeze: Any, single: Single) -> None:
    config = resolved([*FLAGS, *(freeze or ["none"])])
    for images in (IMAGES,) if freeze else (IMAGES, [[]]):
        batch = hf.batch_of(config, images)
        whole = run(chunks_of(config, single), batch)
        trained = {part_of(name) for name in whole if name != "loss"}
        assert trained == {"vision", "projector", "language"} - set(freeze)
        for cut in range(1, len(layer_names(config.model))):
            parts = run(chunks_of(config, single, cut), batch)
            assert parts.keys() == whole.keys()
            for name, value in parts.items():
                if whole[name].abs().max() > 1e-9:
                    assert_same(value, whole[name], tolerance=1e-5, what=f"cut {cut}: {name}")
                else:
                    assert value.abs().max() < 1e-8, f"cut {cut}: {name}"


def test_no_backward_runs_through_a_frozen_tower(single: Single) -> None:
    """The mergers in it are trained all the same, on either side of a cut."""
    config = resolved([*FLAGS, "vision"])
    chunks = chunks_of(config, single, layer_names(config.model).index("vision.layers.1"))
    needed: dict[str, bool] = {}
    for chunk in chunks:
        for name, part in chunk.parts.items():
            part.register_forward_hook(
                lambda _module, _inputs, output, name=name: needed.update(
                    {name: (output[0] if isinstance(output, tuple) else output).requires_grad}
                )
            )
    gradients = run(chunks, hf.batch_of(config, IMAGES))
    assert {name for name, flows in needed.items() if not flows} == {
        name for name in layer_names(config.model) if part_of(name) == "vision"
    }
    assert gradients["deepstack.0.linear_fc1.weight"].abs().max() > 0


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
            torch.manual_seed(2)  # weights do not follow from the cases before
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
LINEAR, ROUTER = "language.layers.0.self_attention", "language.layers.1.mlp.router"
SHARED = "language.layers.1.mlp.shared_experts"
WEIGHTS: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "transposed": ("llava", f"{ATTENTION}.linear_proj.weight", lambda w: w.T, f"{ATTENTION}.linear_proj"),
    "no bias": ("llava", "vision.layers.0.mlp.linear_fc1.bias", torch.zeros_like, "vision.layers.0.mlp.linear_fc1"),
    "heads": ("llava", f"{ATTENTION}.linear_qkv.weight", lambda w: swapped(w, width=8), f"{ATTENTION}.linear_qkv"),
    "position": ("llava", "patch_embed.position", lambda w: w.roll(1, 0), "patch_embed.norm"),
    "no scale": ("internvl", "vision.layers.1.mlp_bda.scale", torch.ones_like, "vision.layers.1"),
    "experts": ("internvl-moe", f"{EXPERTS}.linear_fc1.weight", swapped, f"{EXPERTS}.linear_fc1"),
    "vocabulary": ("llava", "output.linear.weight", swapped, "output"),
    "deepstack": ("qwen3-vl", "deepstack.1.linear_fc2.weight", swapped, "deepstack.1.linear_fc2"),
    "keys": ("gemma3", f"{ATTENTION}.k_layernorm.weight", swapped, f"{ATTENTION}.k_layernorm"),
    "decay": ("qwen3.5", f"{LINEAR}.A_log", swapped, f"{LINEAR}.out_norm"),
    "taps": ("qwen3.5", f"{LINEAR}.conv1d.weight", swapped, f"{LINEAR}.conv1d"),
    "choice": ("glm4v-moe", f"{ROUTER}.expert_bias", swapped, ROUTER),
    "shared": ("qwen3.5-moe", f"{SHARED}.linear_fc2.weight", swapped, f"{SHARED}.linear_fc2"),
}
OPTIONS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "epsilon": ("llava", language(norm_epsilon=1e-4), "language.layers.0.input_layernorm"),
    "rope": ("llava", language(rotary_base=5e5), "language.layers.0.self_attention.core_attention"),
    "activation": ("llava", vision(activation="gelu"), "vision.layers.0.mlp.activation_func"),
    "embedding": ("llava", language(embedding_scale=2.0), "embedding"),
    "both ways": ("gemma3", language(bidirectional_images=False), "language.layers.0.self_attention.core_attention"),
    "window": ("gemma3", language(window_size=4), "language.layers.0.self_attention.core_attention"),
    "axes": ("qwen2.5-vl", language(mrope_section=(1, 2, 1)), "language.layers.0.self_attention.core_attention"),
}


def _doubled(module: Any, gradients: Any) -> Any:
    return tuple(None if each is None else 2 * each for each in gradients)


def parting(a: Side, b: Side, **options: Any) -> str | None:
    given = synthetic_batches(a.config, 1, None)
    if a.config.model.language.mrope_section and a.config.model.video_token is not None:
        given.append(hf.batch_of(a.config, VIDEOS["qwen"][0]))
    batches = [(each, each) for each in given]
    rows = compared(Model(a.chunk, SINGLE_PRECISION), Model(b.chunk, SINGLE_PRECISION), batches, **options)
    return None if (row := first_parting(rows)) is None else row.name


BUILT = ("llava", "internvl", "internvl-moe")


def fast_of(faults: dict[str, Any]) -> list[Any]:
    """Return the faults, those of a model that no other test here builds as slow ones."""
    return [fault if given[0] in BUILT else slow(fault) for fault, given in faults.items()]


@pytest.mark.parametrize("fault", fast_of(WEIGHTS))
def test_a_wrong_weight_is_found_at_its_layer(folders: Folders, fault: str) -> None:
    family, key, change, where = WEIGHTS[fault]
    right, wrong = folders.side(family), folders.side(family, change=lambda model: model)
    [weight] = [each for name, each in (*wrong.chunk.named_parameters(), *wrong.chunk.named_buffers()) if name == key]
    assert parting(right, wrong) is None
    with torch.no_grad():
        weight.copy_(change(weight.clone()))
    assert parting(right, wrong) == where


@pytest.mark.parametrize("fault", fast_of(OPTIONS))
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


@pytest.mark.parametrize("family", fast_and_slow(("llava", "gemma4-moe"), SINGLE))
def test_rounding_is_no_parting(folders: Folders, family: str) -> None:
    """In bf16 as in fp32, and in Transformers as here."""
    right, half = folders.side(family), folders.side(family, "bf16")
    assert right.pretrained is not None
    batches = synthetic_batches(right.config, 2, right.pretrained.tiling)
    rows = compared(Model(right.chunk, HALF), Model(half.chunk, HALF), [(each, each) for each in batches])
    assert first_parting(rows) is None
    assert max(row.difference for row in rows) > 1e-4
    inputs, folder = right.pretrained.family.inputs, right.pretrained.folder.path
    assert inputs is not None
    table = table_in_memory(right.pretrained.family, right.config.model)
    pairs = [(each, inputs(each, right.config.model)) for each in batches]
    theirs = transformers_model(folder, dtype=torch.bfloat16)
    assert first_parting(beside_transformers(Model(half.chunk, HALF), theirs, table, pairs)) is None
    theirs = transformers_model(folder)
    rows = beside_transformers(Model(right.chunk, SINGLE_PRECISION), theirs, table, pairs)
    assert first_parting(rows) is None
    parts = {"vision", "language"} if right.config.model.vision.num_layers else {"language"}
    assert {row.name.partition(".")[0] for row in rows} >= parts, "both parts were compared"
    [norm] = [
        module for name, module in theirs.named_modules() if name.endswith(("language_model.norm", "text_model.norm"))
    ]
    with torch.no_grad():
        norm.weight.mul_(1.01)
    row = first_parting(beside_transformers(Model(right.chunk, SINGLE_PRECISION), theirs, table, pairs))
    assert row is not None
    assert row.name == "language.norm"


def test_tokens_take_the_experts_of_transformers_where_scores_nearly_tie(folders: Folders) -> None:
    """Two rows of each router differ by less than bf16 holds, so that rounding decides between their experts."""
    ours = folders.side("internvl-moe", change=lambda model: model)
    assert ours.pretrained is not None
    inputs, theirs = (
        ours.pretrained.family.inputs,
        transformers_model(ours.pretrained.folder.path, dtype=torch.bfloat16),
    )
    assert inputs is not None
    table = table_in_memory(ours.pretrained.family, ours.config.model)
    for name, router in ours.chunk.named_modules():
        if isinstance(router, Router):
            with torch.no_grad():
                router.weight[1] = router.weight[0] * (1 + 2**-10)
                theirs.get_parameter(table[f"{name}.weight"].hf_names[0]).copy_(router.weight)
    for name, param in (*ours.chunk.named_parameters(), *theirs.named_parameters()):
        if name.endswith(("experts.linear_fc2.weight", "experts.down_proj")):
            param.data.mul_(50)  # most of a layer's output
    batches = synthetic_batches(ours.config, 2, ours.pretrained.tiling)
    pairs = [(each, inputs(each, ours.config.model)) for each in batches]
    assert first_parting(beside_transformers(Model(ours.chunk, HALF), theirs, table, pairs)) is None


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
    assert "they diverge at inputs.patches " in capsys.readouterr().out
    assert compare.main([str(run), str(tmp_path / "out"), data, "--dtype", "fp32", "bf16", "--gradients"]) == 0
    assert compare.main([str(run), str(folder), data, "--transformers"]) == 0
    assert compare.main([str(run), str(folder), "--dtype", "fp32", "bf16", "fp16"]) == 2
