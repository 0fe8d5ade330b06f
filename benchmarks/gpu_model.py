"""Build the VLMs that `gpu_vlm.py` measures, for both sides, and their batch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers_models import OPTIMIZER, llava_config, qwen3_5_config, qwen_config

from megavlm.arch.dims import Dims
from megavlm.arch.image_tokens import grid_of, tokens_per_grid
from megavlm.arch.kinds import layer_cost, step_flops
from megavlm.arch.layers import LANGUAGE_LAYER, LANGUAGE_NORM, OUTPUT, kind_of, layer_names
from megavlm.arch.scenario import scenario_of
from megavlm.arch.workload import Workload, image_workload, sliding_squares
from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config, ModelConfig, PrecisionConfig, TrainConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.types import Sample
from megavlm.families import published_model
from megavlm.families.qwen3_vl import inputs as qwen3_inputs
from megavlm.families.shared.inputs import tokens_and_pixels as llava_inputs
from megavlm.families.shared.qwen_vl import inputs as qwen_inputs
from megavlm.inputs.batch import MicroBatch
from megavlm.inputs.patches import Image
from megavlm.planner.memory import Memory, rank_memory
from megavlm.rules.check import check
from megavlm.rules.load import to_yaml

LEAST_LAYERS = 3  # language layers below which the output layer is most of the language model
_PAD, _RESERVED = 0, 8  # tokens at the end of the vocabulary that text leaves alone


@dataclass(frozen=True)
class Shape:
    """A published model's sizes, and samples of equal length with one image each, which are packed into one sequence.

    Transformers gets the samples as rows of a batch: equally long, they need neither padding nor a mask, which is the
    best case for it. Ours gets them packed in one row.
    """

    name: str
    model: ModelConfig
    images: tuple[tuple[int, int], ...]  # (height, width) in pixels, one image per sample
    sample: int  # tokens of a sample, image included
    theirs: Callable[[Shape], Any]  # the configuration of Transformers
    inputs: Callable[[MicroBatch, ModelConfig], dict[str, Tensor]]

    @property
    def seq_length(self) -> int:
        return self.sample * len(self.images)

    @property
    def vocabulary(self) -> int:
        assert self.model.language.vocab_size is not None
        return self.model.language.vocab_size

    @property
    def num_layers(self) -> int:
        """Of the language model."""
        return self.model.language.num_layers

    def with_layers(self, count: int) -> Shape:
        linear = tuple(layer for layer in self.model.language.linear_attention_layers if layer < count)
        language = replace(self.model.language, num_layers=count, linear_attention_layers=linear)
        return replace(self, model=replace(self.model, language=language))

    def without_image_token(self) -> Shape:
        """Return the shape for a tokenizer that has its own image token."""
        return replace(self, model=replace(self.model, image_token=None))


def models(*, small: bool) -> list[tuple[Shape, ...]]:
    """LLaVA-1.5-7B on 336 × 336 pixels, Qwen2.5-VL-7B and Qwen3.5-4B on photographs; `small`: toys of their kind.

    Of each the shapes to choose from, the largest first: `fitting` says which. Qwen2.5-VL's four photographs are 20,248
    patches, which save more for the backward pass than 80 GB have room for; the two smaller are 6,740.
    """
    llava, qwen, hybrid = map(published_model, ("llava_1_5_7b", "qwen2_5_vl_7b", "qwen3_5_4b"))
    photographs = ((1288, 952), (1036, 1372), (756, 1008), (644, 868))
    if not small:
        llavas = [_shape("LLaVA-1.5-7B", llava, ((336, 336),) * 8, 1024, llava_config, llava_inputs)]
        qwens = [
            _shape(name, qwen, images, 2048, qwen_config, qwen_inputs)
            for name, images in (("Qwen2.5-VL-7B", photographs), ("Qwen2.5-VL-7B, 2 images", photographs[2:]))
        ]
        even = ((1280, 960), (1024, 1376), (768, 1024), (640, 864))  # patches of 16 pixels
        hybrids = [_shape("Qwen3.5-4B", hybrid, even, 2048, qwen3_5_config, qwen3_inputs)]
        return [tuple(llavas), tuple(qwens), tuple(hybrids)]
    toy_llava, toy_qwen, toy_hybrid = _toy(llava), _toy(qwen), _toy(hybrid)
    toy_images = ((168, 112), (112, 140), (56, 84))
    return [
        (_shape("LLaVA toy", toy_llava, ((56, 56),) * 3, 48, llava_config, llava_inputs),),
        (_shape("Qwen2.5-VL toy", toy_qwen, toy_images, 48, qwen_config, qwen_inputs),),
        (_shape("Qwen3.5 toy", toy_hybrid, ((64, 96), (96, 32)), 48, qwen3_5_config, qwen3_inputs),),
    ]


def shapes(*, small: bool) -> list[Shape]:
    """Return the largest shape of each model."""
    return [of_model[0] for of_model in models(small=small)]


def shape_named(name: str, *, layers: int, small: bool) -> Shape:
    """Return the shape that a task names, with `layers` language layers."""
    found = next(shape for of_model in models(small=small) for shape in of_model if shape.name == name)
    return found.with_layers(layers)


def _shape(name: str, model: ModelConfig, images: Any, sample: int, theirs: Any, inputs: Any) -> Shape:
    assert model.language.vocab_size is not None
    return Shape(name, replace(model, image_token=model.language.vocab_size - 1), images, sample, theirs, inputs)


def _toy(model: ModelConfig) -> ModelConfig:
    vision = replace(model.vision, num_layers=3, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4)
    vision = replace(vision, image_size=4 * vision.patch_size)
    language = replace(model.language, num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4)
    language = replace(language, num_query_groups=4, kv_channels=16)
    if vision.full_attention_layers:
        vision = replace(vision, full_attention_layers=(1,))
        language = replace(language, num_query_groups=2, mrope_section=(2, 3, 3))
    if language.linear_attention_layers:
        language = replace(language, num_query_groups=2, mrope_section=(2, 1, 1), rotary_percent=0.5)
        language = replace(language, linear_attention_layers=(0,), linear_num_key_heads=2, linear_num_value_heads=4)
        language = replace(language, linear_key_head_dim=16, linear_value_head_dim=16)
    projector = replace(model.projector, hidden_size=256 if model.projector.pixel_shuffle > 1 else 64)
    return ModelConfig(vision=vision, projector=projector, language=replace(language, vocab_size=128))


def run_config(shape: Shape, *, precision: str, flags: str = "", micro_batches: int = 1) -> Config:
    """One packed sequence per micro-batch; `fp8`: bf16 with products in FP8. `flags` of pretrain_vlm.py come last."""
    train = TrainConfig(
        seq_length=shape.seq_length,
        micro_batch_size=1,
        global_batch_size=micro_batches,
    )
    dtype = PrecisionConfig("bf16" if precision == "fp8" else precision)  # type: ignore[arg-type]
    config = Config(model=shape.model, precision=dtype, train=train, optimizer=OPTIMIZER)
    words = (["--fp8", "hybrid"] if precision == "fp8" else []) + flags.split()
    return with_flags(config, words) if words else config


def with_flags(config: Config, flags: Sequence[str]) -> Config:
    """Return the configuration that pretrain_vlm.py gets from these flags over `--config`. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(to_yaml(config))
        found = parse(["--config", str(file), *flags])
    check(found, world=1)
    return found


def samples_of(shape: Shape) -> list[Sample]:
    """Return random pixels and text, the same for both sides; all of the text is trained."""
    random, vision = np.random.default_rng(1), shape.model.vision
    end, found = shape.vocabulary, []
    for height, width in shape.images:
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        features = tokens_per_grid(grid_of(height, width, vision.patch_size), shape.model.projector)
        text = random.integers(1, end - _RESERVED, shape.sample - features - 2)
        tokens = np.concatenate([[end - 4], np.full(features, end - 1), [end - 3], text])  # 4, 3: vision begins, ends
        trained = np.arange(shape.sample) >= features + 2
        image = Image(height, width, vision.patch_size, partial(np.asarray, pixels))
        found.append(Sample(tokens, trained, (image,)))
    return found


def batch_of(shape: Shape, *, packed: bool) -> MicroBatch:
    """Return the samples packed in one row, or in a row each."""
    samples = samples_of(shape)
    vision = shape.model.vision
    return collate(
        [samples] if packed else [[sample] for sample in samples],
        CollateSpec(
            seq_length=shape.seq_length if packed else shape.sample,
            image_token=shape.vocabulary - 1,
            pad_token=_PAD,
            projector=shape.model.projector,
            patch_dim=vision.in_channels * vision.patch_size**2,
            mrope=bool(shape.model.language.mrope_section),
        ),
    )


def their_inputs(shape: Shape) -> dict[str, Tensor]:
    """Return the batch in Transformers' format, with labels at their own tokens."""
    batch = batch_of(shape, packed=False)
    labels = torch.full_like(batch.text.tokens, -100)
    labels[:, 1:] = torch.where(batch.text.loss_mask[:, :-1].bool(), batch.text.labels[:, :-1], -100)
    return {**shape.inputs(batch, shape.model), "labels": labels}


def workload(shape: Shape) -> Workload:
    """Return the workload of which FLOPs and memory are counted."""
    grids = [grid_of(*size, shape.model.vision.patch_size) for size in shape.images]
    images = image_workload(grids, shape.model)
    sliding = sliding_squares(shape.sample, shape.model.language.window_size)
    squares = {"token_squares": len(grids) * shape.sample**2, "sliding_squares": len(grids) * sliding}
    trained = sum(shape.sample - tokens_per_grid(grid, shape.model.projector) - 2 for grid in grids)  # as `samples_of`
    return replace(images, tokens=shape.seq_length, trained_tokens=trained, **squares)


def whole_flops(shape: Shape) -> float:
    """Return the FLOPs of a step, backward included."""
    return step_flops(run_config(shape, precision="bf16"), workload(shape))


def language_flops(shape: Shape) -> float:
    """Return the FLOPs of language layers, last norm and output: all are trained, so three passes each."""
    work = workload(shape)
    names = [n for n in layer_names(shape.model) if kind_of(n) in (LANGUAGE_LAYER, LANGUAGE_NORM, OUTPUT)]
    return sum(3 * layer_cost(name, shape.model, work).forward_flops for name in names)


def predicted_memory(shape: Shape, *, precision: str, on_gpu: bool, flags: str = "") -> Memory:
    """Return the planner's peak memory of a step."""
    config = run_config(shape, precision="fp32" if precision == "fp32" else "bf16", flags=flags)
    case = replace(scenario_of(config, Dims(), on_gpu=on_gpu), work=workload(shape))
    return rank_memory(case, (0, len(case.names)), 0, recompute=config.execution.recompute_granularity)


def layers_that_fit(shape: Shape, *, memory: float) -> int:
    """Return how many language layers, up to the model's own, fit in `memory` bytes in full bf16 training."""
    for count in range(shape.num_layers, 0, -1):
        if predicted_memory(shape.with_layers(count), precision="bf16", on_gpu=True).total <= memory:
            return count
    return 0


def fitting(shapes: Sequence[Shape], *, memory: float) -> Shape | None:
    """Return the first shape that fits with `LEAST_LAYERS` language layers, else with any number; None if none fits."""
    cut = [(shape, layers_that_fit(shape, memory=memory)) for shape in shapes]
    for least in (LEAST_LAYERS, 1):
        for shape, layers in cut:
            if layers >= least:
                return shape.with_layers(layers)
    return None
