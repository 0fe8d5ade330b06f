"""`Scenario`: one way to run a model, which memory and time follow from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from megavlm.arch.layers import keeps_fp8, layer_names, trained_below, trained_layers, trains_weights
from megavlm.arch.workload import Workload, of_context_part, times, typical_images, typical_workload
from megavlm.config.derived import layer_precision, overlapped, sequence_parallel
from megavlm.config.schema import Config, ModelConfig
from megavlm.parallel.dims import Dims

Recompute = Literal["none", "selective", "full"]
Sharding = Literal["none", "optimizer", "optimizer_gradients", "full"]
Offloaded = Literal["optimizer", "activations"]
# Bytes of an activation or a weight; FP8 keeps both in bf16 outside its products.
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


@dataclass(frozen=True)
class Scenario:
    """A model, what one micro-batch holds, and the layout. Times and bytes follow from nothing else."""

    model: ModelConfig
    work: Workload  # of one micro-batch, on one context-parallel rank
    dims: Dims
    micro_batches: int  # per data-parallel rank and step
    precision: str = "fp32"
    sequence_parallel: bool = False
    sharding: Sharding = "optimizer"  # among DP × CP ranks
    shard_size: int | None = None  # HSDP: ranks that share; default: all DP × CP ranks
    overlap_grad_reduce: bool = False
    own: frozenset[str] = frozenset()  # layers whose own weights are trained
    trained: frozenset[str] = frozenset()  # layers with anything to train, LoRA adapters included
    fp8: frozenset[str] = frozenset()  # layers whose products are in FP8
    offload: tuple[Offloaded, ...] = ()  # what is in host memory
    kept_in_fp8: frozenset[str] = frozenset()  # layers that have their weights in FP8 alone
    on_gpu: bool = False  # a CPU computes RMS norms in steps and keeps them
    te: bool = False  # layers are Transformer Engine's, which a GPU is taken to have unless torch's are asked for
    fused_gradients: bool = True  # Transformer Engine's products may add weight gradients to their sums
    compiled_small_ops: bool = False  # of torch's layers
    loss_chunk: int = 2048  # positions whose logits are in memory at a time

    @property
    def bytes_each(self) -> int:
        return BYTES[self.precision]

    @property
    def sequence_shards(self) -> int:
        """Parts that activations between TP regions are cut into."""
        return self.dims.tp if self.sequence_parallel else 1

    @property
    def shards(self) -> int:
        """DP × CP ranks that share optimizer state (and more)."""
        return 1 if self.sharding == "none" else self.shard_size or self.dims.dp_cp

    @property
    def shards_gradients(self) -> bool:
        return self.sharding in ("optimizer_gradients", "full")

    @cached_property
    def names(self) -> tuple[str, ...]:
        return layer_names(self.model)

    def trains(self, name: str) -> bool:
        """Return whether a layer's own weights have gradients."""
        return name in self.own

    @cached_property
    def gradient_reaches(self) -> tuple[bool, ...]:
        """Return of each layer whether something before it is trained, so that its input needs a gradient."""
        return _gradient_reaches(self.names, self.trained)


@lru_cache(maxsize=256)
def _gradient_reaches(names: tuple[str, ...], trained: frozenset[str]) -> tuple[bool, ...]:
    return tuple(trained_below(name, names[:i], trained) for i, name in enumerate(names))


def encoder_scenario(scenario: Scenario, vision_tp: int) -> Scenario:
    """Return the scenario of a colocated encoder, one copy of which `vision_tp` ranks of the world hold together."""
    dims = Dims(tp=vision_tp, dp=scenario.dims.world // vision_tp)
    sharding: Sharding = "none" if scenario.sharding == "none" else "optimizer"
    return replace(scenario, dims=dims, sharding=sharding, sequence_parallel=vision_tp > 1)


def scenario_of(config: Config, dims: Dims, *, on_gpu: bool = False, colocated: bool | None = None) -> Scenario:
    """Return the scenario that a configuration describes on these degrees; `colocated` may say otherwise."""
    train, size = config.train, config.train.micro_batch_size
    if colocated is None:
        colocated = config.placement.encoder == "colocated"
    images = 0 if colocated else typical_images(config) * size
    return Scenario(
        model=config.model,
        work=of_context_part(times(typical_workload(config), size), dims.cp, images=images),
        dims=dims,
        micro_batches=train.global_batch_size // (size * dims.dp),
        precision=config.precision.dtype,
        sequence_parallel=sequence_parallel(config),
        sharding=config.parallel.data_parallel_sharding,
        shard_size=config.parallel.hybrid_shard_size,
        overlap_grad_reduce=bool(overlapped(config, dp=dims.dp_cp).parallel.overlap_grad_reduce),
        own=frozenset(name for name in layer_names(config.model) if trains_weights(name, config)),
        trained=trained_layers(config),
        fp8=frozenset(name for name in layer_names(config.model) if layer_precision(name, config) == "fp8"),
        offload=config.execution.offload,
        kept_in_fp8=frozenset(name for name in layer_names(config.model) if keeps_fp8(name, config)),
        on_gpu=on_gpu,
        te=on_gpu and config.execution.transformer_impl != "torch",
        fused_gradients=config.execution.gradient_accumulation_fusion,
        compiled_small_ops=config.execution.compile_small_ops,
        loss_chunk=config.execution.loss_chunk_tokens,
    )
