"""Score held-out samples by the model: the log-probability of each trained token, its entropy, and the likeliest ones;
by a reward model: its score of each answer.

The samples are the run's validation samples (`ValidationHook`), so that any layout and packing gives the same. Ranks of
the last stage compute the scores, the reader of each replica knows the samples, and rank 0 combines the two.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megavlm.arch.objectives import SCORER, objective_of
from megavlm.backend import Backend
from megavlm.checkpoint.hf.checkpoint_reader import load_checkpoint
from megavlm.config.schema import Config
from megavlm.data.types import NEGATIVE, ROLE, LoaderState, SampleId, StepData
from megavlm.inputs.batch import MicroBatch
from megavlm.model.cross_entropy import ENTROPY, LOGPROB
from megavlm.train.build import build
from megavlm.train.loop import close
from megavlm.train.run import Run


@dataclass(frozen=True, eq=False)
class TokenScores:
    """The scores of the n trained tokens of a sample, and the k likeliest tokens at each position, likeliest first."""

    positions: NDArray[np.int64]  # [n]: among the sample's tokens
    tokens: NDArray[np.int64]  # [n]
    logprobs: NDArray[np.float64]  # [n]
    entropies: NDArray[np.float64]  # [n], in nats
    top_tokens: NDArray[np.int64]  # [n, k]
    top_logprobs: NDArray[np.float64]  # [n, k]


Scores = TokenScores | NDArray[np.float64]


@dataclass(frozen=True)
class ScoredBatch:
    """The scores of a global batch on rank 0, none on other ranks, and the loader's state after the batch."""

    # With the names of data set and record. A reward model's are [1 or 2]: of an answer, or of the chosen and rejected.
    samples: tuple[tuple[str, str, Scores], ...]
    skipped: int
    after: LoaderState
    last: bool


def scored(
    config: Config, backend: Backend, *, top: int, state: LoaderState | None, checkpoint: Path | None = None
) -> Iterator[ScoredBatch]:
    """Build the run of a configuration, and yield the scores of its validation samples, resumed from `state`.

    With `checkpoint`, the model has this checkpoint's weights in place of those with which a run would begin. A reward
    model scores single answers beside pairs. Every rank iterates to the end. Raises UserError for a run that cannot be
    built or a state of other data.
    """
    if objective_of(config.model).scores:
        objective = replace(config.model.objective, kind=cast(Any, SCORER))
        config = replace(config, model=replace(config.model, objective=objective))
    with contextlib.redirect_stdout(io.StringIO()):  # what a run says of its training
        run = build(config, backend)
    try:
        if checkpoint is not None:
            load_checkpoint(run.engine.trained().chunks, checkpoint)
        yield from scored_batches(run, top=top, state=state)
    finally:
        close(run)


def scored_batches(run: Run, *, top: int, state: LoaderState | None = None) -> Iterator[ScoredBatch]:
    """Yield the scores of the validation samples of a run, resumed from `state`, with `top` likeliest tokens each."""
    loader, engine = run.validation_loader, run.engine
    assert loader is not None, "the run has validation samples"
    if state is not None:
        loader.load_state_dict(state)
    last = False
    compute: Callable[[Sequence[MicroBatch]], list[Tensor]] = partial(engine.schedule.statistics, top=top)
    if objective_of(run.config.model).scores:
        compute = engine.schedule.outputs
    with engine.evaluation():
        while not last:
            step = loader.next_step()
            last = step.last
            yield ScoredBatch(
                samples=tuple(
                    (*run.source.name(sample), scores)
                    for sample, scores in _on_rank_0(run, step, compute(step.batches))
                ),
                skipped=len(step.skipped),
                after=loader.state_dict(),
                last=last,
            )


def _on_rank_0(run: Run, step: StepData, statistics: Sequence[Tensor]) -> Iterator[tuple[SampleId, Scores]]:
    """Yield the samples of a global batch with their scores on rank 0, replica by replica."""
    groups = run.engine.groups
    computes = bool(statistics) and groups.is_first_tp and groups.coords.cp == 0
    pairs = zip(step.batches, statistics, strict=True) if computes else ()
    scores = [each for batch, found in pairs for each in _by_sample(batch, found.cpu().numpy())]
    names = [sample for samples in step.samples for sample in samples] if groups.is_reader else []
    gathered: list[tuple[int, list[SampleId], list[Scores]] | None] = [None] * dist.get_world_size()
    dist.gather_object((groups.coords.dp, names, scores), gathered if dist.get_rank() == 0 else None)
    for replica in range(groups.dims.dp):
        mine = [each for each in gathered if each is not None and each[0] == replica]
        samples = [sample for _, known, _ in mine for sample in known]
        yield from zip(samples, (each for _, _, found in mine for each in found), strict=True)


def _by_sample(batch: MicroBatch, statistics: NDArray[np.float64]) -> Iterator[Scores]:
    """Yield the scores of each sample of a micro-batch from the statistics [B, S, 2 + 2·k] of its positions, or from
    the scores [R] of its answers.
    """
    text = batch.text
    if text.members is not None:
        yield from np.split(statistics, np.flatnonzero(text.members[:, ROLE].cpu().numpy() != NEGATIVE))[1:]
        return
    tokens, mask = text.tokens.flatten().cpu().numpy(), text.loss_mask.flatten().cpu().numpy()
    flat = statistics.reshape(len(mask), -1)
    k = (flat.shape[1] - 2) // 2
    for (first, _), length in zip(text.prefixes, text.lengths, strict=True):
        places = first + np.flatnonzero(mask[first : first + length])  # each predicts the token behind it
        rows = flat[places]
        yield TokenScores(
            positions=places + 1 - first,
            tokens=tokens[places + 1],
            logprobs=rows[:, LOGPROB],
            entropies=rows[:, ENTROPY],
            top_tokens=rows[:, 2 + k :].astype(np.int64),
            top_logprobs=rows[:, 2 : 2 + k],
        )
