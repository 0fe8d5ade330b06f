"""Count a step's tokens and images, sum its numbers over all ranks before the update, and return the results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.arch.image_tokens import Grid
from megavlm.arch.objectives import objective_of
from megavlm.arch.workload import OF_ENCODERS, image_workload, sliding_squares, sound_work
from megavlm.config.derived import has_experts
from megavlm.config.schema import ModelConfig
from megavlm.data.types import StepData
from megavlm.metrics.callback import Value
from megavlm.model.router import Router
from megavlm.parallel.groups import Groups


@dataclass(frozen=True)
class StepResult:
    """The results of one optimizer step, equal on all ranks."""

    loss: float  # mean cross entropy over the trained tokens of the global batch
    trained_tokens: int
    grad_norm: float | None  # before clipping; None if fp16 overflowed or the step was left out
    # Of each data set; NaN if the step has no trained token of it, empty if there is only one data set.
    source_losses: tuple[float, ...]
    counters: tuple[float, ...]  # the caller's counters, summed over all ranks
    expert_loads: Mapping[int, LayerLoad]  # by language layer; empty without experts
    mtp_loss: float | None  # Σ of cross entropies of further tokens / trained tokens, mean over their layers
    measures: Mapping[str, float]  # means of the objective's further metrics
    head_logits: tuple[float, ...]  # the largest logit of each head; empty without `--qk-clip`
    learning_rate: float = 0.0
    updated: bool = False  # False if the step did not change the weights
    refused: str | None = None  # why the judge refused the step
    overflowed: bool = False  # fp16: the gradients did not fit at this loss scale
    loss_scale: float | None = None  # of this step; None except in fp16


def sum_over_ranks(
    totals: Tensor,
    squared_norm: Tensor | None,
    counters: Sequence[float],
    *,
    model: ModelConfig,
    counts: bool,
    tallies: Tensor | None = None,
    logits: Tensor | None = None,
) -> tuple[StepResult, float | None]:
    """Sum a rank's totals (`Schedule.train`; if it `counts`), counters and routers' tallies over all ranks, and wait
    for the device. Return the results before the update, and the norm of the sums of gradients over tokens: None if
    fp16 overflowed.

    `squared_norm` is a rank's addend of the squared norm. A rank that does not count adds x − x, which is 0 for a
    finite number and NaN otherwise: a loss that is not finite on any rank is not finite in the sum. `logits`, which are
    equal on all ranks, are copied to the host in the same transfer.
    """
    own = totals.new_zeros(()) if squared_norm is None else squared_norm
    own_totals = totals if counts else totals - totals
    counted = torch.tensor(counters, dtype=totals.dtype).to(totals.device, non_blocking=True)
    parts = [own.reshape(1), own_totals, counted]
    everything = torch.cat(parts if tallies is None else [*parts, tallies])
    dist.all_reduce(everything)
    summed = len(everything)
    found = (everything if logits is None else torch.cat([everything, logits])).tolist()
    (squared, loss, tokens, *rest), beside = found[:summed], tuple(found[summed:])
    objective = objective_of(model)
    sources, predicts = divmod(len(totals) - len(objective.measured) - 2, 2)
    further = [rest.pop(2 * sources) for _ in range(predicts)]
    measures = objective.means([rest.pop(2 * sources) for _ in objective.measured], tokens)
    first = 2 * sources + len(counters)  # of the tallies
    apart = zip(rest[:sources], rest[sources : 2 * sources], strict=True)
    norm, mean = None if squared_norm is None else squared**0.5, max(tokens, 1.0)
    result = StepResult(
        loss=loss / mean,
        trained_tokens=int(tokens),
        grad_norm=None if norm is None else norm / mean,
        source_losses=tuple(own_loss / own_tokens if own_tokens else math.nan for own_loss, own_tokens in apart),
        counters=tuple(rest[2 * sources : first]),
        mtp_loss=further[0] / mean if predicts else None,
        expert_loads=layer_loads(rest[first:], model),
        measures=measures,
        head_logits=beside,
    )
    return result, norm


@dataclass(frozen=True)
class LayerLoad:
    """The sums of a step for one layer: tokens that took each expert, and the balance losses times trained tokens."""

    tokens: tuple[float, ...]
    balance: float
    z: float

    @property
    def mean(self) -> float:
        return sum(self.tokens) / len(self.tokens)

    @property
    def largest(self) -> float:
        """Return the load of the fullest expert relative to the mean: 1 if all have equally many tokens."""
        return max(self.tokens) / self.mean if self.mean else 1.0

    @property
    def entropy(self) -> float:
        """Return the entropy of the load relative to that of an even load: 1 if even, 0 if one expert has all."""
        shares = [tokens / sum(self.tokens) for tokens in self.tokens if tokens]
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.tokens)) if shares else 1.0


def layer_loads(sums: Sequence[float], model: ModelConfig) -> dict[int, LayerLoad]:
    """Return the loads by layer from the sums of `Schedule.tallies`, [layers · (E + 2)], summed over all ranks."""
    width = model.experts.num_experts + 2
    rows = [sums[start : start + width] for start in range(0, len(sums), width)]
    return {
        layer: LayerLoad(tuple(tokens), balance, z)
        for layer, (*tokens, balance, z) in enumerate(rows)
        if has_experts(model, layer)
    }


def update_biases(routers: Sequence[Router], loads: Mapping[int, LayerLoad]) -> None:
    """Update the expert biases of routers towards an even load."""
    for router in routers:
        if router.expert_bias is not None:
            load = torch.tensor(loads[router.number].tokens, dtype=torch.float32)
            router.update_bias(load.to(router.expert_bias.device, non_blocking=True))


def load_record(loads: Mapping[int, LayerLoad], model: ModelConfig, *, trained_tokens: int) -> dict[str, Value]:
    """Return the experts' fields of a step's record; {} without experts.

    The losses are means over layers and trained tokens, without their coefficients.
    """
    if not loads:
        return {}
    record: dict[str, Value] = {}
    each = loads.values()
    weight = len(loads) * max(trained_tokens, 1)
    if model.experts.aux_loss_coeff:
        record["balance_loss"] = sum(load.balance for load in each) / weight
    if model.experts.z_loss_coeff:
        record["router_z_loss"] = sum(load.z for load in each) / weight
    record["expert_load_max"] = {f"layers.{layer}": load.largest for layer, load in loads.items()}
    record["expert_load_entropy"] = {f"layers.{layer}": load.entropy for layer, load in loads.items()}
    return record


@dataclass(frozen=True)
class Counts:
    """Counts of a global batch, which the all-reduce of the training step sums over ranks."""

    tokens: float = 0
    positions: float = 0
    samples: float = 0  # of data: a sequence may hold several
    image_tokens: float = 0
    images: float = 0
    patches: float = 0
    patch_squares: float = 0
    window_squares: float = 0
    features: float = 0
    token_squares: float = 0
    sliding_squares: float = 0
    frames: float = 0
    frame_squares: float = 0
    sounds: float = 0
    read: float = 0  # samples read, including skipped ones
    skipped: float = 0  # samples skipped
    split: float = 0  # samples of which a part was skipped
    checksum: float = 0  # of each replica's samples of the global batch
    squared_checksum: float = 0
    stop: float = 0  # ranks that were asked to stop
    failed: float = 0  # replicas whose next data cannot be read
    late: float = 0  # replicas whose next data are not read yet

    def values(self) -> Sequence[float]:
        return [float(getattr(self, each.name)) for each in fields(self)]

    def agree(self, replicas: int) -> bool:
        """Return whether the checksums of all replicas are equal (of equal numbers n·Σd² is (Σd)², of others more)."""
        return replicas * int(self.squared_checksum) == int(self.checksum) ** 2


def counts_of(
    step: StepData, groups: Groups, model: ModelConfig, encoded: Sequence[Grid | int] | None = None
) -> Counts:
    """Return the counts of a step on the reader of a replica, and zeros on its other ranks.

    With `--vision-cache`, `encoded` has the grids of the images and the mel frames of the sounds that this rank has
    encoded in the step, those of the next one included (`--encode-ahead`): each rank counts its own.
    """
    if encoded is None:
        read = step.batches if groups.is_reader else []
        encoded = [grid for batch in read for grid in batch.image_sizes.grids]
        encoded = [*encoded, *(length for batch in read for length in batch.sound_frames)]
    frames = [each for each in encoded if isinstance(each, int)]
    images = image_workload([each for each in encoded if not isinstance(each, int)], model)
    done = replace(images, **sound_work(frames, model))
    work = {name: getattr(done, name) for name in OF_ENCODERS}
    if not groups.is_reader:
        return Counts(**work)
    lengths = [length for batch in step.batches for length in batch.text.lengths]
    return Counts(
        tokens=sum(batch.text.num_tokens for batch in step.batches),
        positions=sum(batch.text.tokens.numel() for batch in step.batches),
        samples=len(lengths),
        image_tokens=sum(batch.text.feature_positions.numel() for batch in step.batches),
        images=sum(batch.image_sizes.num_images for batch in step.batches),
        **work,
        token_squares=sum(length * length for length in lengths),
        sliding_squares=sum(sliding_squares(length, model.language.window_size) for length in lengths),
        read=step.read,
        skipped=sum(not skip.partly for skip in step.skipped),
        split=sum(skip.partly for skip in step.skipped),
        checksum=step.checksum,
        squared_checksum=step.checksum**2,
    )
