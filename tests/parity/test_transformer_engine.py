"""Layers of Transformer Engine's parts, with stand-ins for its classes: same names in checkpoints, initial weights,
losses and gradients as torch's, packed or not. Its kernels are for `tests/gpu`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import megatron.core.utils
import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from packaging.version import Version

from megavlm.arch.layers import layer_names
from megavlm.config.schema import Config, ExpertsConfig, LoraConfig, PrecisionConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.model import te
from megavlm.model.weights import initialize
from tests.support import te_kernels
from tests.support.harness import Single
from tests.support.stand_ins import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    transformer_engine,
)
from tests.support.tiny_vlm import VOCABULARY, base, samples_of, trained

RICH = replace(
    base(qk_norm=True, add_qkv_bias=True),
    model=replace(
        base(qk_norm=True, add_qkv_bias=True).model,
        vision=replace(
            base().model.vision, qk_norm="full", layer_scale=True, activation="quick_gelu", add_qkv_bias=False
        ),
    ),
)
_BASE = base(rotary_interleaved=True)
ADAPTED = replace(_BASE, model=replace(_BASE.model, freeze=()), lora=LoraConfig(rank=2))  # and the tower whole
MLPS = {"swiglu": 2, "dswiglu": 2}
# Calls of its kernels in a pass through two vision layers and two language layers.
KERNELS = {
    "plain": MLPS | {"split: joined": 2, "qkv rope": 2, "qkv rope backward": 2},
    "parallel": MLPS | {"split: joined": 4},
    "rich": MLPS | {"qgelu": 2, "dqgelu": 2, "split: joined": 4, "rope": 4, "rope backward": 4},
    "adapted": MLPS | {"split: joined": 2, "qkv rope": 2, "qkv rope backward": 2},
    "masked": {"geglu": 2, "dgeglu": 2, "split: joined": 4, "rope": 4, "rope backward": 4},
    "windowed": MLPS | {"qkv rope": 4, "qkv rope backward": 4},
    "hybrid": MLPS | {"split: joined": 2},
    "outputs": MLPS | {"split: joined": 4, "rope": 2, "rope backward": 2},
    "mixture": {"swiglu": 3, "dswiglu": 3, "split: joined": 2, "qkv rope": 2, "qkv rope backward": 2},
}
WINDOWED = replace(
    base(),
    model=replace(
        base().model,
        vision=replace(
            base().model.vision, position_embedding="rope2d", window_size=16, full_attention_layers=(1,), image_size=24
        ),
    ),
    data=replace(base().data, image_sizes=(24, 40, 16)),
)
# Layers with masks take torch's attention: here the first of two.
MASKED = base(
    activation="geglu", post_norms=True, apply_layernorm_1p=True, qk_norm=True, window_size=20, softmax_scale=0.2,
    full_attention_layers=(1,), local_rotary_base=100.0, embedding_scale=7.0, rotary_interleaved=True,
    rotary_percent=0.5,
)  # fmt: skip
# A dense layer, then one with experts, of which one is shared.
EXPERTS = ExpertsConfig(
    num_experts=4, ffn_hidden_size=32, shared_ffn_hidden_size=48, shared_gate=True, dense_layers=(0,)
)
MIXTURE = replace(base(), model=replace(base().model, experts=EXPERTS))
# Half of a head rotates, and is multiplied by a number that the kernels do not take.
SCALED = {"rotary_percent": 0.5, "rope_attention_factor": 1.3}
# Linear attention, then softmax attention with an output gate.
HYBRID = base(
    linear_attention_layers=(0,), linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=12, linear_conv_kernel_dim=4, attention_output_gate=True, qk_norm=True, **SCALED,
)  # fmt: skip
# Norms of outputs alone, bounded logits, and of two layers one that does not rotate.
OUTPUTS = base(input_norms=False, post_norms=True, qk_norm=True, no_rope_layers=(1,), final_softcap=1.5)
# One norm for attention and MLP, without a bias.
PARALLEL = base(parallel_block=True, normalization="LayerNorm", logit_scale=0.3, **SCALED)
CONFIGS = {
    "plain": base(), "rich": RICH, "adapted": ADAPTED, "windowed": WINDOWED, "masked": MASKED, "hybrid": HYBRID,
    "mixture": MIXTURE, "outputs": OUTPUTS, "parallel": PARALLEL,
}  # fmt: skip


@pytest.fixture
def engine() -> Iterator[Any]:
    """Chooses Transformer Engine, with stand-ins in its place, once called."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(transformer_engine())


def assert_same(ours: tuple[float, dict[str, Any]], theirs: tuple[float, dict[str, Any]]) -> None:
    """Losses and gradients, ours by the names of Transformer Engine's modules."""
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    named = {global_name(local): gradient for local, gradient in ours[1].items()}
    assert named.keys() == theirs[1].keys()
    for key, gradient in theirs[1].items():
        assert (named[key] - gradient).abs().max() <= 1e-5 * max(float(gradient.abs().max()), 1e-8), key


def global_name(local: str) -> str:
    for inside, outside in te._FUSED.items():
        local = local.replace(inside, outside)
    return local


@pytest.mark.parametrize("name", CONFIGS)
def test_names_weights_losses_and_gradients_are_those_of_torch(name: str, single: Single, engine: Any) -> None:
    # No data parallelism here, and so no sums to add gradients to.
    config = replace(CONFIGS[name], execution=replace(CONFIGS[name].execution, gradient_accumulation_fusion=False))
    ours = build(config, single)
    engine()
    theirs = build(config, single)
    shards = [{(s.key, s.global_offset): s for s in chunk.shards()} for chunk in (ours, theirs)]
    assert shards[0].keys() == shards[1].keys()
    for key, shard in shards[0].items():
        assert shard.data.equal(shards[1][key].data), key

    fused = isinstance(theirs.parts["language.layers.0"].mlp.linear_fc1, TELayerNormColumnParallelLinear)
    # Adapters read what the norm writes, and so do attention and MLP.
    assert fused == (name not in ("adapted", "outputs", "parallel"))
    assert not any(getattr(module, "te_return_bias", False) for module in theirs.modules()), "biases to add apart"
    source, samples = samples_of(config, (140, 132, 125, 140))
    rows = [samples[:2], samples[2:]]
    alone = collate([[samples[0]]], CollateSpec.of(config, source, seq_length=144))
    packed = collate(rows, CollateSpec.of(config, source, seq_length=288))
    for batch, format in ((alone, "sbhd"), (packed, "thd")):
        # Images of the tower's own size, or full windows, are a batch, where they come first; what follows has bounds.
        whole = ["bshd"] if batch is alone else ["bshd", "thd"]
        vision = ["bshd", "thd", "thd"] if name == "windowed" else whole * 2
        loss, gradients = trained(ours, [batch])
        TEDotProductAttention.calls.clear()
        te_kernels.calls.clear()
        found, found_gradients = trained(theirs, [batch])
        assert te_kernels.calls == KERNELS[name]
        assert TEDotProductAttention.calls == vision + [format] * (1 if name in ("masked", "hybrid") else 2)
        assert_same((found, found_gradients), (loss, gradients))


def test_experts_in_fp8_are_its_grouped_products(single: Single, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same weights as torch's, in multiples of rows that FP8 takes; without its rounding, same losses and gradients."""
    monkeypatch.setattr(te, "_fp8_region", lambda layer_config: nullcontext())
    monkeypatch.setattr(megatron.core.utils, "_te_version", Version("2.11.0"))
    its_own = importlib.import_module("megatron.core.extensions.transformer_engine")
    monkeypatch.setattr(its_own, "TELinear", TEColumnParallelLinear)  # what a shared expert looks for
    config = replace(MIXTURE, execution=replace(MIXTURE.execution, gradient_accumulation_fusion=False))
    ours = build(config, single)
    engine()
    theirs = build(replace(config, precision=PrecisionConfig("fp32", fp8="hybrid", fp8_recipe="tensorwise")), single)
    assert [name for name, _ in theirs.named_parameters() if "weight0" in name] == []
    shards = [{(s.key, s.global_offset): s.data for s in chunk.shards()} for chunk in (ours, theirs)]
    assert shards[0].keys() == shards[1].keys()
    assert all(data.equal(shards[1][key]) for key, data in shards[0].items())
    theirs.load_state_dict({name: param for name, param in theirs.named_parameters()})

    source, samples = samples_of(config, (140, 132, 125, 140))
    batches = [collate([[sample]], CollateSpec.of(config, source, seq_length=144)) for sample in samples[:2]]
    loss, gradients = trained(ours, batches)
    te_kernels.calls.clear()
    found, found_gradients = trained(theirs, batches)
    assert te_kernels.calls["grouped"] == 4  # two products of one layer, in two micro-batches
    assert_same((found, found_gradients), (loss, gradients))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_attention_enters_a_random_state_for_dropout_alone(
    dropout: float, sequence_parallel: bool, single: Single
) -> None:
    """Also with sequence parallelism, where Transformer Engine relies on megatron-core's block of layers for that."""
    config = SimpleNamespace(attention_dropout=dropout, sequence_parallel=sequence_parallel)
    groups = SimpleNamespace(tp=single.groups.tp, cp=single.groups.alone)
    attention = te.flattened(TEDotProductAttention)(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    assert (attention.attention_dropout_ctx is not nullcontext) == bool(dropout)


@pytest.mark.parametrize("name", ["rich", "outputs"])
def test_layers_keep_no_graph_in_evaluations(name: str, single: Single) -> None:
    """megatron-core adds branches with gradients enabled, which would keep what norms of all layers have read."""
    chunk, kept = build(CONFIGS[name], single).eval(), []
    for _, layer in chunk.transformer_layers:
        layer.register_forward_hook(lambda module, given, output: kept.append(output[0].requires_grad))
    source, samples = samples_of(CONFIGS[name], (40,))
    with torch.no_grad():
        chunk(collate([samples], CollateSpec.of(CONFIGS[name], source, seq_length=40)))
    assert kept == [False] * 4


def test_weights_go_from_one_to_the_other_without_pickles(single: Single, engine: Any) -> None:
    ours = build(base(), single)
    engine()
    theirs = build(base(), single)
    state = {global_name(name): param + 1 for name, param in theirs.named_parameters()}
    ours.load_state_dict(state)
    renamed = {name: state[global_name(name)] for name, _ in theirs.named_parameters()}
    theirs.load_state_dict(renamed)  # without the stand-ins' extra state, which refuses to be anything
    assert all(param.equal(renamed[name]) for name, param in theirs.named_parameters())


def build(config: Config, single: Single) -> Any:
    chunk = single.chunk(config, layer_names(config.model), vocab_size=VOCABULARY)
    initialize(chunk, config, vocab_size=VOCABULARY)
    return chunk


def in_fp8(recipe: str, **more: Any) -> Config:
    return replace(base(), precision=PrecisionConfig("bf16", fp8="hybrid", fp8_recipe=recipe, **more))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Each layer is a region of its own, or none at all.
        (in_fp8("tensorwise"), "v0 v1 [ l0 ] [ l1 ]"),
        (in_fp8("tensorwise", first_last_layers_bf16=True, num_layers_at_end_in_bf16=0), "v0 v1 l0 [ l1 ]"),
        # One region holds all layers; those in high precision are exempt.
        (in_fp8("delayed"), "[ ( v0 ) ( v1 ) l0 l1 ]"),
        (in_fp8("delayed", fp8_parts=("vision", "language")), "[ v0 v1 l0 l1 ]"),
    ],
)
def test_fp8_regions(config: Config, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    @contextmanager
    def region(begin: str, end: str) -> Any:
        events.append(begin)
        yield
        events.append(end)

    monkeypatch.setattr(te, "_fp8_region", lambda layer_config: region("[", "]"))
    monkeypatch.setattr(te, "_high_region", lambda: region("(", ")"))
    execution = te.Fp8Execution(config, SimpleNamespace(tp=None))
    layer = SimpleNamespace(config=None)
    names = [name for name in layer_names(config.model) if ".layers." in name]
    with execution.chunk([(name, layer) for name in names]):
        for name in names:
            with execution.layer(name, layer):
                events.append(name[0] + name[-1])
    assert " ".join(events) == expected
    assert isinstance(execution.chunk([]), nullcontext)
