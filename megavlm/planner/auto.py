"""`--plan auto` and `--dry-run`: the planner's answers for one configuration, without touching a device."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.parallel.dims import Dims
from megavlm.planner.case import case_of
from megavlm.planner.hardware import profile
from megavlm.planner.layers import encoder_names
from megavlm.planner.memory import Memory, rank_memory
from megavlm.planner.plan import make_plan
from megavlm.planner.search import search
from megavlm.planner.step import colocated_encoder


def planned(config: Config, world: int) -> Config:
    """The configuration with the layout that a search finds for this many processes, where `--plan auto` asks for one.

    Raises UserError where no layout can run, with the most frequent reason.
    """
    if config.parallel.plan != "auto":
        return config
    if config.model.language.vocab_size is None:
        raise UserError(
            "--plan auto needs --language-vocab-size: the tokenizer's size is not known before the run begins"
        )
    outcome = search(config, world, profile(config.parallel.hardware), top=1)
    if not outcome.best:
        reasons = [each.reason for each in outcome.rejected]
        common = max(set(reasons), key=reasons.count)
        raise UserError(f"--plan auto finds no layout of {world} processes that can run: {common}")
    return _manual(outcome.config(config))


def _manual(config: Config) -> Config:
    """What was found is what RUN_DIR/config.yaml says: starting again does not search again."""
    return replace(config, parallel=replace(config.parallel, plan="manual"))


def memory_of(config: Config, dims: Dims, *, on_gpu: bool) -> list[Memory]:
    """Predicted peak of each pipeline rank of a configured layout."""
    plan, case = make_plan(config, dims), case_of(config, dims, on_gpu=on_gpu)
    first = len(encoder_names(config.model)) if plan.placement == "colocated" else 0
    bounds = list(accumulate((len(names) for names in plan.chunks), initial=first))
    modes = [config.train.recompute_granularity] * len(plan.chunks)
    ranks = [rank_memory(case, [0, *bounds[1:]], rank, recompute=modes, skip=first) for rank in range(dims.pp)]
    if not first:
        return ranks
    counts = config.data.images_per_sample
    encoder = colocated_encoder(
        case,
        profile("h100" if on_gpu else "cpu"),
        images=max(1, round(sum(counts) / max(1, len(counts)))) * config.train.micro_batch_size,
        chunk_patches=config.parallel.encoder_chunk_patches,
        kept=config.parallel.encoder_keep_chunks,
    )
    return [memory + encoder.memory for memory in ranks]
