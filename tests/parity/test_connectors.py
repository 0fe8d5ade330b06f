"""Connectors: features and gradients of their papers or of Transformers, and what each declares of its costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from megavlm.arch.connector import connector_of
from megavlm.arch.dims import Dims
from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.arch.kinds import layer_cost, model_parameters, saved_bytes
from megavlm.arch.layers import PROJECTOR
from megavlm.arch.scenario import scenario_of
from megavlm.arch.workload import image_workload
from megavlm.checkpoint.hf.importing import load_weights
from megavlm.checkpoint.hf.pretrained import pretrained_of, with_pretrained_model
from megavlm.command_line.parsing import parse
from megavlm.config.registry import registered
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.model.vision import VisionLayout
from megavlm.rules.defaults import resolve
from tests.support.extensions import POOLED, forget, install
from tests.support.flags import MODELS, resolved
from tests.support.harness import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, Single, assert_same, randomize

# Smaller than a square of tokens, equal neighbours, and sides that nothing divides.
GRIDS = ((2, 3), (4, 4), (4, 4), (1, 5), (7, 6))
LENGTHS = [rows * columns for rows, columns in GRIDS]
WIDTH, OUTPUTS, SQUEEZE = 20, 24, 5
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
    return F.linear(out[0], ours["projection.weight"], ours["projection.bias"])


PERCEIVER: dict[str, Any] = {
    "hidden_size": OUTPUTS,
    "resampler_n_latents": 5,
    "resampler_depth": 2,
    "resampler_n_heads": 6,
    "resampler_head_dim": 4,
    "num_key_value_heads": 3,
}


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


def of_idefics2(theirs: Any, ours: dict[str, Tensor], patches: Tensor) -> Tensor:
    return theirs.model.connector(patches[None], torch.ones(1, len(patches), dtype=torch.long))[0]


Features = Callable[[Any, dict[str, Tensor], Tensor], Tensor]
CASES: dict[str, tuple[Callable[[], Any], str, Features]] = {
    "qformer": (bare_qformer, "--set model.projector.connectors.qformer.num_queries=5", of_qformer),
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
    ours = dict(chunk.parts[PROJECTOR].named_parameters())
    assert_alike(chunk.parts[PROJECTOR], lambda patches, grid: features(theirs, ours, patches))


def assert_alike(part: Any, features: Callable[[Tensor, tuple[int, int]], Tensor]) -> None:
    """Features of all images, and the gradient of their patches, are those of a function of one image."""
    patches = torch.randn(sum(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True)
    layout = VisionLayout.of(GRIDS, class_token=False, multiple=1, blank=(1, 1))
    mine = part(patches[:, None], layout, tile_groups=(), sequence_parallel=False)[:, 0]
    wanted = torch.cat([features(each, grid) for each, grid in zip(patches.split(LENGTHS), GRIDS, strict=True)])
    assert_same(mine, wanted, tolerance=OUTPUT_TOLERANCE, what="features")
    toward = torch.randn(mine.shape, generator=torch.Generator().manual_seed(3))
    gradients = []
    for out in (mine, wanted):
        (out * toward).sum().backward()
        gradients.append(patches.grad)
        patches.grad = None
    assert_same(gradients[0], gradients[1], tolerance=GRADIENT_TOLERANCE, what="gradient of the patches")


class ChannelNorm(nn.LayerNorm):
    """Layer norm of the channels of [N, C, rows, columns]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class RegNetBlock(nn.Module):
    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.conv3 = nn.Conv2d(channels, channels, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = (ChannelNorm(channels) for _ in range(3))
        self.squeeze, self.excite = nn.Conv2d(channels, SQUEEZE, 1), nn.Conv2d(SQUEEZE, channels, 1)
        self.shortcut: nn.Module = nn.Identity()
        self.shortcut_norm: nn.Module = nn.Identity()
        if inputs != channels:
            self.shortcut, self.shortcut_norm = nn.Conv2d(inputs, channels, 1, bias=False), ChannelNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x))))))
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return F.silu(self.norm3(self.conv3(y)) + self.shortcut_norm(self.shortcut(x)))


class Honeybee(nn.Module):
    """[C, rows, columns] of an image → [side², outputs]."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(16, width))
        self.before = nn.Sequential(*(RegNetBlock(channels if n else width, channels) for n in range(2)))
        self.after = nn.Sequential(*(RegNetBlock(channels, channels) for _ in range(2)))
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(channels, 14), "fc2": nn.Linear(14, OUTPUTS)})

    def forward(self, image: Tensor) -> Tensor:
        table = self.positions.T.unflatten(1, (4, 4))[None]
        x = image[None] + F.interpolate(table, size=image.shape[1:], mode="bicubic")
        y = self.after(F.adaptive_avg_pool2d(self.before(x), (3, 3)))
        return self.mlp["fc2"](F.silu(self.mlp["fc1"](y.flatten(2)[0].T)))


@pytest.mark.parametrize("channels", [12, WIDTH], ids=["projected", "as-wide-as-the-tower"])
def test_a_c_abstractor_is_that_of_its_paper(single: Single, channels: int) -> None:
    """Cha et al. 2024, in torch's own layers: Transformers has no such model."""
    theirs = randomize(Honeybee(WIDTH, channels), seed=1)
    sizes = {"side": 3, "depth": 2, "squeeze_size": SQUEEZE, "ffn_hidden_size": 14, "hidden_size": channels}
    flags = [f"model.projector.connectors.c_abstractor.{name}={value}" for name, value in sizes.items()]
    config = resolved([*SIZES, "--projector-kind", "c_abstractor", "--set", *flags])
    part: Any = single.chunk(config, (PROJECTOR,), vocab_size=97).parts[PROJECTOR]
    weights, ours = dict(theirs.named_parameters()), dict(part.named_parameters())
    assert ours.keys() == weights.keys()
    with torch.no_grad():
        for name, param in ours.items():
            param.copy_(weights[name].view_as(param))  # a 1 × 1 convolution is a matrix here
    assert_alike(part, lambda patches, grid: theirs(patches.T.unflatten(1, grid)))
    for name, param in ours.items():
        gradient = weights[name].grad.view_as(param)
        assert_same(param.grad, gradient, tolerance=GRADIENT_TOLERANCE, what=f"gradient of {name}")


def spans(patches: int, tokens: int) -> list[slice]:
    """Return the patches of each token along a side: from ⌊i·n/t⌋ to ⌈(i+1)·n/t⌉."""
    return [slice(i * patches // tokens, -(-(i + 1) * patches // tokens)) for i in range(tokens)]


@pytest.mark.parametrize(("name", "number"), [("side", 3), ("factor", 2)])
def test_pooled_tokens_are_means_over_rectangles_row_by_row(single: Single, name: str, number: int) -> None:
    flags = ["--projector-kind", "adaptive_pool", "--set", "model.projector.connectors.adaptive_pool.hidden_size=14"]
    config = resolved([*SIZES, *flags, f"model.projector.connectors.adaptive_pool.{name}={number}"])
    part: Any = single.chunk(config, (PROJECTOR,), vocab_size=97).parts[PROJECTOR]
    with torch.no_grad():
        for seed, param in enumerate(part.parameters()):
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)))
    weights = dict(part.named_parameters())

    def pooled(patches: Tensor, grid: tuple[int, int]) -> Tensor:
        (rows, columns), image = grid, patches.view(*grid, WIDTH)
        down, right = (3, 3) if name == "side" else (-(-rows // 2), -(-columns // 2))
        means = [image[y, x].flatten(0, 1).mean(0) for y in spans(rows, down) for x in spans(columns, right)]
        inner = F.gelu(F.linear(torch.stack(means), weights["mlp.fc1.weight"], weights["mlp.fc1.bias"]))
        return F.linear(inner, weights["mlp.fc2.weight"], weights["mlp.fc2.bias"])

    assert_alike(part, pooled)


def test_a_folder_decides_and_contradictions_are_one_line(tmp_path: Path) -> None:
    bare_qformer().save_pretrained(tmp_path)
    argv = [*SIZES, "--projector-from", str(tmp_path)]
    found = with_pretrained_model(
        parse([*argv, "--set", "model.projector.connectors.qformer.num_queries=7"])
    ).model.projector
    assert (found.kind, found.connectors.qformer.num_queries, found.connectors.qformer.num_layers) == ("qformer", 7, 3)
    with pytest.raises(
        UserError, match=r"model.projector.connectors.qformer.num_layers 4 contradicts .*, which has 3: leave it out"
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
    (tmp_path / "config.json").write_text(json.dumps({"model_type": f"megavlm_{kind}", "megavlm": section}))
    save_file({"positions": torch.zeros(16, 20)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=says) as caught:
        with_pretrained_model(parse([*SIZES, "--projector-from", str(tmp_path)]))
    assert len(str(caught.value).splitlines()) == 1


EVEN_SIZES = (
    "--set model.vision.hidden_size=64 model.vision.num_attention_heads=2 model.vision.patch_size=4 "
    "model.vision.image_size=32 model.language.hidden_size=48 model.language.num_attention_heads=2 "
    "model.language.vocab_size=97"
)
EVEN_GRIDS = ((8, 8), (8, 8), (8, 4))
CONNECTORS = {
    "mlp": "",
    "gated": "--projector-kind gated",
    "deep_mlp": "--projector-kind deep_mlp --set model.projector.hidden_size=30",
    "swiglu": "--projector-kind swiglu",
    "pooled": " ".join(POOLED),
    "qformer": MODELS["qformer"],
    "perceiver": MODELS["perceiver"],
    "adaptive_pool": "--projector-kind adaptive_pool --set model.projector.connectors.adaptive_pool.side=3",
    "c_abstractor": MODELS["c-abstractor"],
}
MLPS = ("mlp", "deep_mlp", "gated", "swiglu")


def config_of(name: str) -> Config:
    install()
    try:
        return resolved([*EVEN_SIZES.split(), *CONNECTORS[name].split()])
    finally:
        if name != "pooled":
            forget()


@pytest.mark.parametrize(
    ("name", "frozen"),
    # What frozen MLPs keep is taken to be what trained ones do.
    [(name, frozen) for name in CONNECTORS for frozen in (False, True) if not frozen or name not in MLPS],
)
def test_a_connector_is_what_it_says(single: Single, name: str, frozen: bool) -> None:
    config = config_of(name)
    model = config.model
    part: Any = single.chunk(config, (PROJECTOR,), vocab_size=97).parts[PROJECTOR]
    with torch.no_grad():
        for param in part.parameters():
            param.normal_(0, 0.02)
    assert sum(param.numel() for param in part.parameters()) == model_parameters(PROJECTOR, model)
    own = {param.untyped_storage().data_ptr() for param in part.parameters()}
    for param in part.parameters():
        param.requires_grad_(not frozen)
    work = image_workload(EVEN_GRIDS, model)
    assert work.features == sum(tokens_per_grid(grid, model.projector) for grid in EVEN_GRIDS)
    hidden = torch.randn(work.patches, 1, model.vision.hidden_size, requires_grad=True)
    layout = VisionLayout.of(EVEN_GRIDS, class_token=False, multiple=1, blank=(1, 1))
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor), FlopCounterMode(display=False) as counted:
        out = part(hidden, layout, tile_groups=(), sequence_parallel=False)
    assert out.shape == (work.features, 1, model.language.hidden_size)
    whole = scenario_of(config, Dims())
    scenario = replace(whole, work=work, own=whole.own - {PROJECTOR} if frozen else whole.own)
    assert saved_bytes(PROJECTOR, scenario) == pytest.approx(sum(kept.values()), rel=0.02)
    cost = layer_cost(PROJECTOR, model, work)  # torch does not count its attention on a CPU
    assert cost.forward_flops - cost.attention_flops == pytest.approx(counted.get_total_flops(), rel=0.01)
    if name == "pooled":
        forget()


def test_every_connector_is_here() -> None:
    assert registered("connectors").keys() - {"linear"} == CONNECTORS.keys() - {"pooled"}


@pytest.mark.parametrize("name", CONNECTORS)
@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_hold_all_of_a_weight_once(name: str, tp: int) -> None:
    """The rows of all ranks are those of the model, each once, and each rank holds as many, padding included."""
    model = config_of(name).model
    for leaf, split in connector_of(model.projector).splits(model).items():
        parts = [split.part(tp, rank) for rank in range(tp)]
        if parts[0] is None:
            assert split.size // split.unit % tp == 0, leaf
            continue
        rows = [row for part in parts for run in part.runs for row in range(run.real, run.real + run.count)]
        assert sorted(rows) == list(range(split.size)), leaf
    forget()
