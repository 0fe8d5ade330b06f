"""Rules of FP8: shapes that its kernels support, and options that conflict."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megavlm.arch.tensor_split import language_split, mlp_share, vision_split
from megavlm.config.derived import (
    fp8_in,
    fp8_multiple,
    layers_that_run,
    sequence_multiple,
    shards_gradients,
    unwindowed,
    windowed,
)
from megavlm.config.lora_config import trained_whole
from megavlm.config.messages import nearest
from megavlm.config.schema import Config
from megavlm.rules import Rule
from megavlm.rules.defaults import resolve_model


def fp8(config: Config) -> Iterator[str]:
    """Check options that conflict with FP8. Delayed scaling updates its history at the end of an FP8 region, which
    spans all layers of a chunk. Ranks run different numbers of passes of a colocated encoder, so that collectives of
    FP8 scaling would not match.
    """
    precision = config.precision
    if precision.fp8 == "none":
        return
    if precision.dtype != "bf16":
        yield f"--fp8 {precision.fp8} needs --precision bf16, but that is {precision.dtype}: add --precision bf16"
    if not precision.fp8_parts:
        yield f"--fp8 {precision.fp8} has no --fp8-parts: name language or vision, or use --fp8 none"
    if precision.fp8_recipe == "delayed" and precision.first_last_layers_bf16:
        yield (
            "--first-last-layers-bf16 does not support --fp8-recipe delayed: use --fp8-recipe tensorwise, or leave "
            "--first-last-layers-bf16 out"
        )
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    for part in precision.fp8_parts if precision.first_last_layers_bf16 else ():
        if start + end >= (layers := layers_that_run(part, config)):
            yield (
                f"precision.num_layers_at_start_in_bf16 {start} and precision.num_layers_at_end_in_bf16 {end} leave "
                f"none of the {layers} {part} layers to FP8: together use at most {layers - 1}"
            )
    if "vision" in precision.fp8_parts and config.placement.encoder == "colocated":
        yield "--fp8-parts vision cannot be combined with --placement colocated: use --fp8-parts language"
    # Transformer Engine's tests of `fully_shard` cover the other recipes.
    if precision.fp8_recipe == "blockwise" and shards_gradients(config):
        yield (
            "--fp8-recipe blockwise is not known to work with --data-parallel-sharding "
            f"{config.parallel.data_parallel_sharding}: use --fp8-recipe tensorwise, or --data-parallel-sharding "
            "optimizer"
        )


def fp8_weights_are_gathered(config: Config) -> Iterator[str]:
    """Check `--fp8-param-gather`: FP8 weights need the distributed optimizer, which keeps their fp32 main weights."""
    precision, sharding = config.precision, config.parallel.data_parallel_sharding
    if not precision.fp8_param_gather:
        return
    if sharding != "optimizer":
        yield (
            f"--fp8-param-gather needs --data-parallel-sharding optimizer, but that is {sharding}: change it, or leave "
            "--fp8-param-gather out"
        )
    if precision.fp8_recipe == "mxfp8":
        yield "--fp8-param-gather does not support --fp8-recipe mxfp8: use --fp8-recipe tensorwise, or leave it out"
    trained = [part for part in precision.fp8_parts if part in trained_whole(config)]
    if not trained:
        yield (
            "--fp8-param-gather finds no weights that are trained in FP8 (frozen and adapted ones are not gathered): "
            "leave it out"
        )


def fp8_fits_the_tokens(config: Config) -> Iterator[str]:
    """Check that the tokens of a micro-batch on one rank are a multiple that FP8 products support."""
    train, precision = config.train, config.precision
    if not fp8_in("language", config):
        return
    parallel = config.parallel
    multiple = sequence_multiple("language", config, tp=parallel.tensor_model_parallel_size)
    multiple *= parallel.context_parallel_size
    if train.seq_length * train.micro_batch_size % multiple == 0:
        return
    step = multiple // math.gcd(multiple, train.micro_batch_size)
    yield (
        f"--seq-length {train.seq_length} × --micro-batch-size {train.micro_batch_size} is not a multiple of "
        f"{multiple}, which --fp8-recipe {precision.fp8_recipe} and sequences that are split over "
        f"{multiple // fp8_multiple(precision.fp8_recipe)} need: --seq-length: {nearest(train.seq_length, step)}"
    )


def fp8_fits_the_widths(config: Config) -> Iterator[str]:
    """Check that the widths of linear layers on one rank are multiples that FP8 products support."""
    precision, model, tp = config.precision, config.model, config.parallel.tensor_model_parallel_size
    multiple = fp8_multiple(precision.fp8_recipe)
    widths: list[tuple[str, int, int, int]] = []
    for part, sizes in (("vision", model.vision), ("language", model.language)):
        if fp8_in(part, config):
            hidden, ffn = sizes.hidden_size, sizes.ffn_hidden_size
            widths.append((f"model.{part}.hidden_size", hidden, hidden, multiple))
            widths.append((f"model.{part}.ffn_hidden_size", ffn, mlp_share(ffn, tp), multiple * tp))
    for flag, width, on_rank, step in widths:
        if on_rank % multiple:
            yield (
                f"{flag} {width} is not a multiple of {step}, which FP8 products need (--fp8-recipe "
                f"{precision.fp8_recipe}, --tp {tp}): {nearest(width, step)}"
            )


def fp8_fits_the_heads(config: Config) -> Iterator[str]:
    """Check that the widths of attention projections on one rank are multiples that FP8 products support."""
    if config.precision.fp8 == "none":  # a search asks this of each layout
        return
    precision, model, tp = config.precision, resolve_model(config.model), config.parallel.tensor_model_parallel_size
    step = fp8_multiple(precision.fp8_recipe)
    seen = windowed(model.language), unwindowed(model.language)
    splits = [("vision", vision_split(model.vision, tp)), *(("language", language_split(each, tp)) for each in seen)]
    for part, split in dict.fromkeys(splits):
        if not fp8_in(part, config):
            continue
        queries = split.local_heads * split.width
        for what, channels in (("query", queries), ("query, key and value", split.local_rows)):
            if channels % step:
                yield (
                    f"model.{part}.num_attention_heads {split.heads}: {channels} channels of {what} heads on a rank "
                    f"are not a multiple of {step}, which FP8 products need (--fp8-recipe {precision.fp8_recipe}, --tp "
                    f"{tp}): use another number or width of heads, a smaller --tp, or --fp8 none"
                )


PRECISION_RULES: tuple[Rule, ...] = (
    fp8,
    fp8_weights_are_gathered,
    fp8_fits_the_tokens,
    fp8_fits_the_widths,
    fp8_fits_the_heads,
)
