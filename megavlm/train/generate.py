"""Greedy generation through the training pipeline, with a key/value cache: each new token costs one position."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.data.collate import CollateSpec, collate
from megavlm.data.types import Sample
from megavlm.inputs.batch import Continuation, ImageBatch, ImageSizes, KeyValueCache, MicroBatch, TextBatch
from megavlm.parallel.groups import broadcast_from_last_stage
from megavlm.parallel.rendezvous import of_all_ranks
from megavlm.train.engine import Engine


class GivenUp(Exception):
    """Generation was aborted because the run was asked to stop. All ranks raise this error in the same step."""


def generate(
    engine: Engine,
    spec: CollateSpec,
    prompts: Sequence[Sample],
    *,
    micro_batch_size: int,
    max_new_tokens: int,
    stop: Collection[int] = (),
    give_up: Callable[[], bool] | None = None,
) -> list[list[int]]:
    """Return up to `max_new_tokens` tokens for each prompt, each the most likely next token; equal on all ranks.

    An answer ends before the first token of `stop`. Each data-parallel rank takes every DP-th prompt. All ranks have
    equally many micro-batches, because sharded weights (ZeRO-3) are gathered by all ranks for each pass. The number is
    a multiple of PP, as the interleaved schedule requires; the first prompt is repeated to fill up. The caller enters
    `engine.evaluation()`. Raises GivenUp before another token if `give_up()` is true on any rank.
    """
    groups = engine.groups
    mine = list(prompts[groups.coords.dp :: groups.dims.dp])
    most, round_size = -(-len(prompts) // groups.dims.dp), micro_batch_size * groups.dims.pp
    work = [*mine, *[prompts[0]] * (-(-most // round_size) * round_size - len(mine))]
    multiple = engine.sequence_multiple
    longest = max(len(prompt.tokens) for prompt in prompts)  # on all ranks: experts may gather all of their tokens
    spec = replace(spec, seq_length=-(-longest // multiple) * multiple)
    room = spec.seq_length + max_new_tokens + multiple
    device = engine.schedule.backend.device
    samples = [work[i : i + micro_batch_size] for i in range(0, len(work), micro_batch_size)]
    batches = [_prompts(each, spec, room=room, device=device) for each in samples]
    following = torch.stack([_next_position(batch.text, row) for batch in batches for row in range(micro_batch_size)])
    chosen: list[list[int]] = []
    while len(chosen) < max_new_tokens:
        logits = engine.schedule.logits(batches)
        chosen.append(_next_tokens(engine, logits, count=len(work), never=spec.feature_tokens))
        if (stop or give_up) and _all_ended(chosen, stop, device, give_up):
            break
        places = (following + len(chosen) - 1).split(micro_batch_size)
        tokens = torch.tensor(chosen[-1]).split(micro_batch_size)
        batches = [_next(*each, spec, width=multiple) for each in zip(batches, tokens, places, strict=True)]
    answers = [_until(stop, answer) for answer in zip(*chosen, strict=True)]
    return _interleave(engine, answers[: len(mine)], total=len(prompts))


def following_tokens(
    logits: Callable[[MicroBatch], Tensor],
    spec: CollateSpec,
    prompts: Sequence[Sample],
    *,
    room: int,
    device: torch.device,
    choose: Callable[[Tensor], Tensor],
) -> Iterator[Tensor]:
    """Yield the next token [B] of each prompt, up to `room` times, for a model that is whole in one process.

    `logits` returns a micro-batch's logits [B, S, vocabulary], and `choose` a token for each row of [B, vocabulary].
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    spec = replace(spec, seq_length=longest)
    batch = _prompts(prompts, spec, room=longest + room + 1, device=device)
    places = torch.stack([_next_position(batch.text, row) for row in range(len(prompts))])
    for number in range(room):
        scores = logits(batch)[:, -1]
        scores[:, list(spec.feature_tokens)] = -torch.inf
        chosen = choose(scores).cpu()
        yield chosen
        batch = _next(batch, chosen, places + number, spec, width=1)


def _prompts(samples: Sequence[Sample], spec: CollateSpec, *, room: int, device: torch.device) -> MicroBatch:
    """Return a micro-batch of prompts with an empty cache for `room` positions per prompt."""
    last = torch.tensor([len(sample.tokens) - 1 for sample in samples]).to(device)
    batch = collate([[sample] for sample in samples], spec)
    return replace(batch, continuation=Continuation(KeyValueCache(room), torch.zeros_like(last), last))


def _next_position(text: TextBatch, row: int) -> Tensor:
    """Return the rotary position of the token that follows a prompt; with M-RoPE it is the same on all three axes."""
    length = text.lengths[row]
    return text.positions[..., row, length - 1].max() + 1


def _next(batch: MicroBatch, tokens: Tensor, places: Tensor, spec: CollateSpec, *, width: int) -> MicroBatch:
    """Return the micro-batch for one more token [B] of each row, padded to `width` positions, and no images.

    `places` [B] are the rotary positions of these tokens.
    """
    assert batch.continuation is not None
    ids = torch.full((len(tokens), width), spec.pad_token)
    ids[:, 0] = tokens
    positions = places[:, None] + torch.arange(width)
    text = TextBatch(
        tokens=ids,
        labels=torch.full_like(ids, spec.pad_token),
        loss_mask=torch.zeros(ids.shape),
        positions=positions.expand(3, -1, -1) if spec.mrope else positions,
        feature_positions=torch.empty(0, dtype=torch.int64),
        lengths=(1,) * len(tokens),
    )
    images = ImageBatch(ImageSizes(), torch.empty(0, spec.patch_dim))
    return MicroBatch(text, ImageSizes(), images, continuation=batch.continuation.advanced())


def _next_tokens(engine: Engine, logits: Sequence[Tensor], *, count: int, never: Sequence[int]) -> list[int]:
    """Return the most likely next token of each of `count` rows, on all pipeline stages.

    `never`, the tokens of images, videos and sounds, are masked out: generated text has no features.
    """
    chosen = torch.zeros(count, dtype=torch.long, device=engine.schedule.backend.device)
    if logits:
        scores = torch.cat(list(logits))[:, -1]
        scores[:, list(never)] = -torch.inf
        chosen = scores.argmax(-1)
    return broadcast_from_last_stage(chosen, engine.groups).tolist()


def _all_ended(
    chosen: Sequence[Sequence[int]], stop: Collection[int], device: torch.device, give_up: Callable[[], bool] | None
) -> bool:
    """Return whether every answer on every rank contains a token of `stop`. Raises GivenUp."""
    going = any(set(stop).isdisjoint(answer) for answer in zip(*chosen, strict=True))
    flags = torch.tensor([going, give_up is not None and give_up()], dtype=torch.int32, device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    goes_on, given_up = flags.tolist()
    if given_up:
        raise GivenUp
    return not goes_on


def _until(stop: Collection[int], answer: Sequence[int]) -> list[int]:
    end = next((place for place, token in enumerate(answer) if token in stop), len(answer))
    return list(answer[:end])


def _interleave(engine: Engine, mine: list[list[int]], *, total: int) -> list[list[int]]:
    """Gather the answers of all data-parallel ranks in the order of the prompts."""
    degree = engine.groups.dims.dp
    shares = of_all_ranks(mine, engine.groups.dp)
    return [shares[i % degree][i // degree] for i in range(total)]
