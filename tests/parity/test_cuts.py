"""DeepStack's features past every cut: two chunks, one after the other, give the losses and gradients of one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from megavlm.arch.layers import layer_names, part_of
from megavlm.arch.plan import Plan
from megavlm.config.schema import Config
from megavlm.inputs.batch import MicroBatch
from megavlm.model.vlm import VLMChunk
from megavlm.model.weights import initialize
from megavlm.pipeline.schedule import pipeline_config
from tests.support import hf
from tests.support.flags import resolved
from tests.support.harness import Single, assert_same

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
