"""Predict device memory of each pipeline rank: weights, gradients, optimizer state, and the peak that a step adds.

The counts follow this program's allocations: gradients are summed in fp32 unless bf16 is requested; master weights
exist only under bf16, or where gradients are sharded (ranks then shard the master weights); a micro-batch is on the
device from when its predecessor is taken until every chunk has taken it. `host_memory.py` counts what `--offload` moves
to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megavlm.arch.ends import LOSS_WORK, computes_logits_again, logits_bytes, predictions, vocabulary_shard
from megavlm.arch.kind import FP32, ROUND, HiddenWeight
from megavlm.arch.kinds import (
    adapter_parameters,
    hidden_bytes,
    is_transformer,
    kind_in,
    layer_sizes,
    layout_parameters,
    rank_parameters,
    saved_bytes,
    state_bytes,
    updated_parameters,
    waiting_bytes,
)
from megavlm.arch.layer_sizes import mask_bytes, score_bytes
from megavlm.arch.layers import EMBEDDING, LANGUAGE_LAYER, OUTPUT, PATCH_EMBED, kind_of
from megavlm.arch.objectives import objective_of, ties_output
from megavlm.arch.scenario import Recompute, Scenario, encoder_scenario
from megavlm.arch.schedules import held_at_peaks, scenario_shape
from megavlm.config.messages import aligned
from megavlm.planner.collectives import all_to_all, group_of
from megavlm.planner.hardware import CONTEXT, WORLD, Hardware


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory of one rank, by use."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0  # saved for the backward passes in flight
    transient: float = 0.0  # in addition, at the peak of a backward pass or of the gradient reduction
    data: float = 0.0  # the step's batches, and image features where the encoder runs ahead of the pipeline
    communicators: float = 0.0  # NCCL's, and CUDA's context

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))

    @property
    def model_state(self) -> float:
        """Return the bytes that stay allocated from step to step: weights, gradients, optimizer."""
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def model_state_bytes(name: str, scenario: Scenario, *, copies_vocabulary: bool = False) -> Memory:
    """Return the bytes of a layer's weights, gradients and optimizer state on one rank.

    `copies_vocabulary`: a tied output layer is in another chunk than the embedding, and so has a copy of its weight.
    """
    total = Memory()
    for layout in scenario.layouts:
        for count, trained in _parts(name, layout):
            if copies_vocabulary and name == OUTPUT and ties_output(scenario.model) and layout is scenario:
                count += vocabulary_shard(scenario.model, scenario.dims.tp)
            if trained == scenario.trains(name):  # adapters have none
                total += Memory(weights=_fp8_copies(name, count, scenario))
            if scenario.shards_gradients:
                stays = 1.0 if scenario.sharding != "full" or not _is_unit(name, scenario) else _second_shard(scenario)
                total += _sharded(name, count, layout, trained=trained, stays=stays)
            else:
                total += _model_state(name, count, layout, trained=trained)
    return total


def _parts(name: str, layout: Scenario) -> list[tuple[int, bool]]:
    """Return how many weights of its own a layer has and whether they are trained; with adapters, the same of these."""
    added = adapter_parameters(name, layout)
    return [(layout_parameters(name, layout) - added, layout.trains(name)), (added, True)][: 1 + (added > 0)]


def _fp8_copies(name: str, count: float, scenario: Scenario) -> float:
    """Return the bytes of Transformer Engine's FP8 copies of a layer's weights: one as is and one transposed, a byte
    per number each, on every rank even if weights are sharded. Weights kept in FP8 alone are these two copies, as large
    as bf16 weights: 0 more.
    """
    copied = scenario.on_gpu and name in scenario.fp8 and name not in scenario.kept_in_fp8
    return 2 * count * copied


def _model_state(name: str, count: float, scenario: Scenario, *, trained: bool) -> Memory:
    if not trained:
        return Memory(weights=count * scenario.bytes_each)
    masters = FP32 * count if scenario.bytes_each != FP32 else 0
    state = masters + FP32 * kept_numbers(name, scenario, count) * moments_here(scenario)
    gradients = count * scenario.gradient_bytes + _residuals(count, scenario)
    return Memory(weights=count * scenario.bytes_each, gradients=gradients, optimizer=state / scenario.shards)


def _second_shard(scenario: Scenario) -> float:
    """Return the share of gathered weights that a rank keeps from the forward to the backward pass (hpZ); else 0."""
    ranks = scenario.regathering_ranks
    return 1 / ranks if ranks < scenario.shards else 0.0


def _sent_share(scenario: Scenario) -> float:
    """Return the share of its gradients that a rank sends coded (0: no code)."""
    if scenario.gradient_code == "none" or scenario.dims.dp_cp == 1:
        return 0.0
    return 1 / (scenario.shards if scenario.shards < scenario.dims.dp_cp else scenario.code_group)


def _residuals(count: float, scenario: Scenario) -> float:
    """Return the bytes of the coding errors that a rank keeps of the gradients it sends (error feedback)."""
    return count * FP32 * _sent_share(scenario)


def _sharded(name: str, count: float, scenario: Scenario, *, trained: bool, stays: float) -> Memory:
    """Return the model state of a layer under ZeRO-2 and 3: the share `stays` of the gathered weights, and shards of
    everything else.
    """
    gathered, here = count * scenario.bytes_each * stays, parameters_here(scenario)
    if not trained:
        return Memory(weights=gathered + count * scenario.bytes_each / scenario.shards * here)
    state = FP32 * (count * here + kept_numbers(name, scenario, count) * moments_here(scenario))
    gradients = count * FP32 / scenario.shards * (here or not scenario.on_gpu)  # on a CPU they are not copied
    gradients += _residuals(count, scenario)
    return Memory(weights=gathered, gradients=gradients, optimizer=state / scenario.shards)


def moments_here(scenario: Scenario) -> bool:
    """Return whether optimizer state is in device memory (no `--offload optimizer`)."""
    return "optimizer" not in scenario.offload


def parameters_here(scenario: Scenario) -> bool:
    """Return whether a rank's parameter shards are in device memory (no `--offload parameters`, which needs ZeRO-3)."""
    return "parameters" not in scenario.offload


def is_offloaded(name: str, scenario: Scenario) -> bool:
    """Return whether a layer's saved activations are offloaded to the host."""
    return "activations" in scenario.offload and is_transformer(name)


def kept_bytes(name: str, scenario: Scenario, recompute: Recompute = "none") -> float:
    """Return the device bytes of activations that a layer saves for the backward pass of one micro-batch."""
    return 0.0 if is_offloaded(name, scenario) else saved_bytes(name, scenario, recompute)


def _is_unit(name: str, scenario: Scenario) -> bool:
    """Return whether `optim/fully_sharded.py` gathers a layer's weights separately from those of other layers."""
    vocabulary = name in (EMBEDDING, OUTPUT) and not ties_output(scenario.model)
    return vocabulary or is_transformer(name)


def _gathered(name: str, scenario: Scenario) -> float:
    """Return the bytes of ZeRO-3's buffers: a layer's gathered weights, the prefetched ones of the next, and gradients
    of those that are trained.
    """
    if scenario.sharding != "full" or not _is_unit(name, scenario):
        return 0.0
    trained = sum(updated_parameters(name, layout) for layout in scenario.layouts)
    return (2 * rank_parameters(name, scenario) + trained) * scenario.bytes_each


def _widened(names: Sequence[str], scenario: Scenario) -> float:
    """Return the bytes of the fp32 copies of bf16 gradients that a rank's update needs; 0 if gradients are fp32."""
    if scenario.gradient_bytes == FP32 or scenario.shards_gradients:
        return 0.0
    return sum(FP32 * updated_parameters(name, each) / each.shards for name in names for each in scenario.layouts)


def _reduced(name: str, scenario: Scenario) -> float:
    """Return the bytes of a layer's gradients and of the copy that ranks reduce (ZeRO-2 and 3).

    With codes, the gradients are freed before decoding, and decoded values exist twice while scales are applied.
    """
    if not (scenario.shards_gradients and _is_unit(name, scenario)):
        return 0.0
    decoded = 2 * FP32 * _sent_share(scenario) if scenario.shards == scenario.dims.dp_cp else 0.0
    each = scenario.gradient_bytes + max(scenario.bytes_each, decoded)
    return each * sum(updated_parameters(name, layout) for layout in scenario.layouts)


def replicated_encoder(scenario: Scenario, *, vision_tp: int = 1) -> Memory:
    """Return the model state of a colocated encoder on each rank, whole or split over `vision_tp` ranks.

    Optimizer state is sharded over all ranks that hold the same part of the encoder.
    """
    total, alone = Memory(), encoder_scenario(scenario, vision_tp)
    for name in scenario.names[: scenario.names.index(EMBEDDING)]:
        for count, trained in _parts(name, alone):
            total += _model_state(name, count, alone, trained=trained)
    return total


def transient_bytes(name: str, scenario: Scenario, recompute: Recompute = "none", *, last_stage: bool = False) -> float:
    """Return the bytes that a layer's backward pass needs in addition to all kept activations.

    With offloading, these include the layer's own fetched activations and the prefetched ones of the next layer; in a
    pipeline also those of the last layer that ran forward. At a layer's end its activations are freed, but its
    gradients exist.
    """
    needed = _backward_bytes(name, scenario, recompute) + _gathered(name, scenario)
    if is_offloaded(name, scenario):
        own = saved_bytes(name, scenario, recompute)
        turns = scenario.dims.pp > 1 and not last_stage
        return needed + own * (1 + turns) + max(own, _reduced(name, scenario))
    if name == OUTPUT and "activations" in scenario.offload:
        # The last layer is still here.
        needed += saved_bytes(scenario.names[scenario.names.index(OUTPUT) - 2], scenario, recompute)
    # As a layer's gradients are reduced, what it saved or computed again is gone.
    gone = saved_bytes(name, scenario, "none" if recompute == "full" else recompute)
    return needed + max(0.0, _reduced(name, scenario) - gone)


def _backward_bytes(name: str, scenario: Scenario, recompute: Recompute) -> float:
    e = scenario.bytes_each
    scores = score_bytes(scenario, layer_sizes(name, scenario).heads) if kind_of(name) == LANGUAGE_LAYER else 0.0
    if is_transformer(name) and recompute == "full":
        # One layer at a time is computed anew; its input replaces its gradient.
        return saved_bytes(name, scenario) + _expert_bytes(name, scenario) + scores
    if name == OUTPUT:
        if objective_of(scenario.model).pools:
            return 2 * hidden_bytes(name, scenario)
        weight = vocabulary_shard(scenario.model, scenario.dims.tp) * e * scenario.trains(OUTPUT)
        logits = logits_bytes(scenario)  # of some positions, then of a block of the vocabulary
        kept = scenario.trains(OUTPUT) and not computes_logits_again(scenario)
        work = min(LOSS_WORK, logits / e * FP32)
        return max(work, weight) if kept else weight + logits + work
    # Gradients that arrive, and that leave.
    return 2 * hidden_bytes(name, scenario) + _expert_bytes(name, scenario) + scores


def _expert_bytes(name: str, scenario: Scenario) -> float:
    """Return the bytes at the beginning of the backward pass of a layer's experts: gradients of rows, as received and
    sorted by expert, and gradients of the second product's weights.
    """
    routed = layer_sizes(name, scenario).routed if is_transformer(name) else None
    if routed is None:
        return 0.0
    weights = routed.experts * routed.hidden * routed.ffn * scenario.trains(name)
    return (2 * routed.rows * routed.hidden + weights) * scenario.bytes_each


def batch_bytes(scenario: Scenario, *, with_patches: bool) -> float:
    """Return the bytes of one micro-batch: token ids, labels and positions of 8 bytes, a mask of 4, indices of image
    features and of trained tokens (8 each), and pixels. Context-parallel ranks also have the token ids of whole rows.
    """
    axes = 3 if scenario.model.language.mrope_section else 1
    predicted = 1 + scenario.model.language.mtp_layers  # each with labels, mask and positions of its own
    numbers = 1 + predicted * (1 + axes) + scenario.dims.cp * (scenario.dims.cp > 1)
    text = scenario.work.tokens * (8 * numbers + 4 * predicted) + (scenario.work.features + predictions(scenario)) * 8
    vision = scenario.model.vision
    pixels = scenario.work.patches * vision.in_channels * vision.patch_size**2 * scenario.bytes_each
    return text + pixels * with_patches


_GROUP = 0.04 * 2**30  # bytes of a further communicator, measured as `WORLD` was


def communicator_bytes(scenario: Scenario) -> float:
    """Return the bytes of CUDA's context and of a rank's NCCL communicators, one per group; 0 on a CPU."""
    dims, size = scenario.dims, {"tp": scenario.dims.tp, "cp": scenario.dims.cp, "pp": scenario.dims.pp}
    size["dp"] = dims.dp
    axes = [("tp",), ("cp",), ("pp",), ("dp", "cp"), ("tp", "pp"), ("tp", "cp", "pp")]
    groups = {frozenset(axis for axis in each if size[axis] > 1) for each in axes} - {frozenset()}
    further = 2 * (dims.ep > 1) + 2 * (1 < scenario.shards < dims.dp_cp)
    total = CONTEXT + (WORLD + _GROUP * (len(groups) + further)) * (dims.world > 1)
    return total * scenario.on_gpu


def batches_at_once(scenario: Scenario) -> int:
    """Return how many micro-batches of data the device holds: those that not all chunks have taken (with interleaved
    chunks, as many as pipeline ranks), and the next one; on a CPU also all micro-batches of the step on the host.
    """
    taken = scenario.dims.pp if scenario.dims.vpp > 1 else 1
    return min(scenario.micro_batches, taken + 1) + scenario.micro_batches * (not scenario.on_gpu)


def rank_memory(scenario: Scenario, bounds: Sequence[int], rank: int, *, recompute: Recompute, skip: int = 0) -> Memory:
    """Return the peak memory of one pipeline rank. `bounds` are the cuts between chunks: indices into the layer list,
    with both ends.

    `skip`: number of first layers to leave out, because they are a colocated encoder.
    """
    spans = [scenario.names[a:b] for a, b in pairwise(bounds)]
    total, transient = Memory(), 0.0
    for chunk, held in zip(scenario.dims.chunks_of(rank), held_at_peaks(scenario_shape(scenario))[rank], strict=True):
        names = [name for name in spans[chunk] if scenario.names.index(name) >= skip]
        alone = EMBEDDING not in spans[chunk]
        for name in names:
            total += model_state_bytes(name, scenario, copies_vocabulary=alone)
        saved = sum(kept_bytes(name, scenario, recompute) for name in names)
        saved += mask_bytes(scenario) * any(kind_of(name) == LANGUAGE_LAYER for name in names)
        if scenario.dims.pp > 1 and not scenario.on_gpu:
            total += Memory(data=_sent_bytes(scenario, bounds, chunk, whole=max(whole for whole, _ in held)))
        saved += state_bytes(scenario)[bounds[chunk]]  # arrives in one tensor with the hidden states
        waiting = sum(waiting_bytes(name, scenario) for name in names)
        total += Memory(activations=max(whole * saved + halves * waiting for whole, halves in held))
        last = rank == scenario.dims.pp - 1
        transient = max(
            transient, *(transient_bytes(name, scenario, recompute, last_stage=last) for name in names), 0.0
        )
    # Activations are gone by then. gloo's reduce-scatter sums a copy of the gradients, NCCL's needs none.
    copies = scenario.sharding == "optimizer" and scenario.dims.dp_cp > 1 and not scenario.on_gpu
    held_names = [
        name for chunk in scenario.dims.chunks_of(rank) for name in spans[chunk][max(0, skip - bounds[chunk]) :]
    ]
    update = matrix_bytes(held_names, scenario) + _widened(held_names, scenario)
    transient = max(transient, max(total.gradients * copies, update) - total.activations)
    with_patches = not skip and any(PATCH_EMBED in spans[chunk] for chunk in scenario.dims.chunks_of(rank))
    data = batches_at_once(scenario) * batch_bytes(scenario, with_patches=with_patches)
    if scenario.shards_gradients and scenario.micro_batches == 1:  # shards are made as activations go
        total = replace(total, gradients=max(0.0, total.gradients - total.activations))
    return total + Memory(transient=transient, data=data, communicators=communicator_bytes(scenario))


def _sent_bytes(scenario: Scenario, bounds: Sequence[int], chunk: int, *, whole: int) -> float:
    """Return the bytes of a chunk's send buffers that gloo has not confirmed: hidden states of micro-batches without
    returned gradients, and all gradients that the chunk sent in the step (`pipeline/walker.py`).
    """
    states, last = state_bytes(scenario), len(scenario.names)
    entering, leaving = (
        hidden_bytes(scenario.names[cut], scenario) + states[cut] if 0 < cut < last else 0.0
        for cut in (bounds[chunk], bounds[chunk + 1])
    )
    return whole * leaving + scenario.micro_batches * entering


def table(memories: Sequence[Memory]) -> str:
    """Return a text table of the memory of each pipeline rank, in GiB, or in MiB if all are small."""
    unit, size = ("GiB", 2**30) if max(memory.total for memory in memories) > 2**30 else ("MiB", 2**20)
    names = [name for name in vars(memories[0]) if name != "communicators" or memories[0].communicators]
    rows = [("rank", *names, "total")] + [
        (str(rank), *(f"{getattr(memory, name) / size:.2f}" for name in (*names, "total")))
        for rank, memory in enumerate(memories)
    ]
    return "\n".join([f"memory of each pipeline rank at its peak, {unit}", *aligned(rows)])


_COPIES = 4  # of matrices: received, assembled, batched, and in the update (measured, `tests/dist/test_memory.py`)


def state_numbers(scenario: Scenario) -> int:
    """Return how many numbers the optimizer keeps per parameter that is updated elementwise."""
    return len(scenario.optimizer.rule.elementwise.state)


def kept_numbers(name: str, layout: Scenario, count: float) -> float:
    """Return how many numbers the optimizer keeps for a rank's `count` trained parameters of a layer: state and weight
    averages, without fp32 weights. `layout` is one of `Scenario.layouts`.
    """
    options = layout.optimizer
    state = count * state_numbers(layout)
    if options.rule.matrix_cost is not None and layout.trains(name):  # adapters are updated elementwise
        fewer = state_numbers(layout) - len(options.rule.state)
        state -= fewer * sum(weight.size for weight in _weights(name, layout)) / layout.dims.tp
    return state + count * (options.ema_decay > 0)


def matrix_seconds(names: Sequence[str], scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds in which the ranks of a stage update its matrices, each rank a share of them, with two
    all-to-alls; 0 with an elementwise rule.
    """
    cost, options, shapes = scenario.optimizer.rule.matrix_cost, scenario.optimizer, _shapes(names, scenario)
    if cost is None or not shapes:
        return 0.0
    ranks = scenario.dims.tp * scenario.dims.dp_cp
    flops = [cost.flops(options, *shape) for shape in shapes]
    size = cost.number_bytes(options) * sum(rows * columns for rows, columns in shapes) / ranks
    travel = 2 * all_to_all(size, group_of(hardware, ranks, span=ranks))
    return max(sum(flops) / ranks, *flops) / hardware.forward.matmul + travel


def matrix_bytes(names: Sequence[str], scenario: Scenario) -> float:
    """Return the temporary bytes of a rank's update of matrices; 0 with an elementwise rule."""
    cost, shapes = scenario.optimizer.rule.matrix_cost, _shapes(names, scenario)
    if cost is None or not shapes:
        return 0.0
    sizes = [rows * columns for rows, columns in shapes]
    ranks = scenario.dims.tp * scenario.dims.dp_cp
    return _COPIES * cost.number_bytes(scenario.optimizer) * max(*sizes, min(ROUND, sum(sizes) / ranks))


def _shapes(names: Sequence[str], scenario: Scenario) -> list[tuple[int, int]]:
    if scenario.optimizer.rule.matrix_cost is None:
        return []
    trained = (name for name in names if scenario.trains(name))
    weights = (kind_in(scenario.model, name).hidden_weights(scenario.model).values() for name in trained)
    return [shape for held in weights for weight in held for shape in weight.shapes()]


def _weights(name: str, layout: Scenario) -> list[HiddenWeight]:
    weights = kind_in(layout.model, name).hidden_weights(layout.model).values()
    return [weight for weight in weights if bool(weight.experts) == layout.experts_alone]
