"""Greedy generation through the training pipeline. There is no key/value cache: each token is a full forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from megavlm.data.collate import CollateSpec, collate
from megavlm.data.types import Sample
from megavlm.parallel.groups import broadcast_from_last_stage
from megavlm.train.engine import Engine


def generate(
    engine: Engine, spec: CollateSpec, prompts: Sequence[Sample], *, micro_batch_size: int, max_new_tokens: int
) -> list[list[int]]:
    """Return `max_new_tokens` tokens for each prompt, each the most likely next token; equal on all ranks.

    Each data-parallel rank takes every DP-th prompt. A rank repeats prompts until the number of its micro-batches is
    a multiple of PP, as the interleaved schedule requires.
    """
    groups = engine.groups
    mine = list(prompts[groups.coords.dp :: groups.dims.dp])
    round_size = micro_batch_size * groups.dims.pp
    work = [*mine, *[prompts[0]] * (-max(len(mine), 1) % round_size + (0 if mine else 1))]
    answers: list[list[int]] = [[] for _ in work]
    longest = max(len(prompt.tokens) for prompt in prompts) + max_new_tokens
    multiple = engine.sequence_multiple
    spec = replace(spec, seq_length=-(-longest // multiple) * multiple)
    engine.evaluating(True)
    for _ in range(max_new_tokens):
        extended = [_extend(prompt, answer) for prompt, answer in zip(work, answers, strict=True)]
        batches = [
            collate([[sample] for sample in extended[i : i + micro_batch_size]], spec)
            for i in range(0, len(extended), micro_batch_size)
        ]
        lengths = torch.tensor([len(sample.tokens) for sample in extended])
        logits = engine.schedule.logits(batches)
        tokens = _next_tokens(engine, logits, lengths, never=spec.image_token)
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
    engine.evaluating(False)
    return _interleave(engine, answers[: len(mine)], total=len(prompts))


def _extend(prompt: Sample, answer: Sequence[int]) -> Sample:
    tokens = np.concatenate([prompt.tokens, np.asarray(answer, dtype=prompt.tokens.dtype)])
    return replace(prompt, tokens=tokens, trained=np.zeros(len(tokens), dtype=np.bool_))


def _next_tokens(engine: Engine, logits: Sequence[torch.Tensor], lengths: torch.Tensor, *, never: int) -> list[int]:
    """Return the most likely token after each sequence, on all pipeline stages.

    `never`, the image token, is masked out: generated text has no image features.
    """
    device = engine.schedule.backend.device
    chosen = torch.zeros(len(lengths), dtype=torch.long, device=device)
    if logits:
        scores = torch.cat(list(logits))
        last = scores[torch.arange(len(lengths), device=device), lengths.to(device) - 1]
        last[:, never] = -torch.inf
        chosen = last.argmax(-1)
    return broadcast_from_last_stage(chosen, engine.groups).tolist()


def _interleave(engine: Engine, mine: list[list[int]], *, total: int) -> list[list[int]]:
    """Gather the answers of all data-parallel ranks in the order of the prompts."""
    degree = engine.groups.dims.dp
    shares: list[list[list[int]]] = [[] for _ in range(degree)]
    dist.all_gather_object(shares, mine, group=engine.groups.dp)
    return [shares[i % degree][i // degree] for i in range(total)]
