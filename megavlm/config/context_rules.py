"""Rules about context parallelism: what it must divide, and what it does not support."""

from __future__ import annotations

import math
from collections.abc import Callable

from megavlm.config.derived import masks_attention, sequence_parallel
from megavlm.config.messages import divisors, nearest
from megavlm.config.schema import Config
from megavlm.config.tensor_split import context_heads, local_heads


def heads_divide_over_context(config: Config) -> str | None:
    """Refuse --cp-comm-type a2a where CP does not divide the query heads of a tensor-parallel rank."""
    tp, cp = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    if config.parallel.cp_comm_type == "a2a" and (heads := local_heads(config)) % cp:
        return (
            f"--context-parallel-size {cp} does not divide the {heads} query heads of a rank "
            f"(model.language.num_attention_heads {config.model.language.num_attention_heads}, "
            f"--tensor-model-parallel-size {tp}): set it to {divisors(heads)}, or use --cp-comm-type auto"
        )
    return None


def sequence_divides_over_context(config: Config) -> str | None:
    cp, length = config.parallel.context_parallel_size, config.train.seq_length
    tp = config.parallel.tensor_model_parallel_size if sequence_parallel(config) else 1
    groups = cp // context_heads(config)
    multiple = math.lcm(cp * tp, 2 * groups if groups > 1 else 1)
    if cp > 1 and length % multiple:
        return (
            f"--seq-length {length} is not divisible by {multiple}, the parts into which ranks split a sequence "
            f"(--context-parallel-size {cp}{f' × --tensor-model-parallel-size {tp}' if tp > 1 else ''}"
            f"{f', two parts each for {groups} groups that gather keys' if groups > 1 else ''}): "
            f"{nearest(length, multiple)}"
        )
    return None


def gathered_keys_have_no_masks(config: Config) -> str | None:
    cp, heads = config.parallel.context_parallel_size, context_heads(config)
    if heads < cp and masks_attention(config.model.language):
        return (
            f"--context-parallel-size {cp} gathers keys and values, as only {heads} of the ranks can exchange heads; "
            "that supports no sliding windows and no images that attend both ways: use a --cp that divides the heads "
            "of a rank, with --cp-comm-type a2a"
        )
    return None


CONTEXT_RULES: tuple[Callable[[Config], str | None], ...] = (
    heads_divide_over_context,
    sequence_divides_over_context,
    gathered_keys_have_no_masks,
)
