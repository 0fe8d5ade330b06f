"""`Scenario`: a model, a micro-batch and a layout, the input of the models of memory and time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from megavlm.arch.dims import Dims
from megavlm.arch.layers import (
    keeps_fp8,
    kept_inputs,
    layer_names,
    trained_below,
    trained_layers,
    trains_weights,
)
from megavlm.arch.workload import Workload, of_context_part, times, typical_images, typical_workload
from megavlm.config.derived import (
    Offloaded,
    layer_precision,
    moments_folder,
    offloaded,
    overlapped,
    sequence_parallel,
)
from megavlm.config.schema import Config, LoraConfig, ModelConfig, OptimizerConfig

Recompute = Literal["none", "selective", "full"]
Sharding = Literal["none", "optimizer", "optimizer_gradients", "full"]
Code = Literal["none", "bf16", "int8", "fp8"]
HOST_PIECE = 2**24  # elements that `optim/stores.py` copies at a time
# Assumed rows of the busiest expert-parallel rank, relative to the mean: a router with a balance loss should reach it.
EXPERT_IMBALANCE = 1.2
# Bytes of an activation or a weight; FP8 keeps both in bf16 outside its products.
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


@dataclass(frozen=True)
class Scenario:
    """A model, the content of one micro-batch, and the layout: the whole input of the models of time and memory."""

    model: ModelConfig
    work: Workload  # of one micro-batch, on one context-parallel rank
    dims: Dims
    micro_batches: int  # per data-parallel rank and step
    precision: str = "fp32"
    sequence_parallel: bool = False
    sharding: Sharding = "optimizer"  # among DP × CP ranks
    shard_size: int | None = None  # HSDP: ranks that state is sharded over; default: all DP × CP ranks
    secondary: int | None = None  # hpZ: ranks that keep a second shard of weights for the backward pass
    overlap_grad_reduce: bool = False
    gradient_bytes: int = BYTES["fp32"]  # of a number while gradients are reduced
    gradient_code: Code = "none"  # in which gradients are sent
    weight_code: Code = "none"
    code_group: int = 1  # neighbouring ranks that sum uncompressed gradients before codes are sent
    own: frozenset[str] = frozenset()  # layers whose own weights are trained
    trained: frozenset[str] = frozenset()  # layers with anything to train, LoRA adapters included
    adapted: frozenset[str] = frozenset()  # layers whose linear layers' inputs stay for adapters (`kept_inputs`)
    lora: LoraConfig = field(default_factory=LoraConfig)
    fp8: frozenset[str] = frozenset()  # layers whose products are in FP8
    fp8_recipe: str = "tensorwise"  # how their operands are scaled
    offload: tuple[Offloaded, ...] = ()  # kinds of state in host memory
    moments_on_disk: bool = False  # where the optimizer is offloaded
    kept_in_fp8: frozenset[str] = frozenset()  # layers that have their weights in FP8 alone
    on_gpu: bool = False  # a CPU saves intermediate results of RMS norms
    te: bool = False  # layers are Transformer Engine's: assumed on a GPU unless --transformer-impl is torch
    fused_gradients: bool = True  # Transformer Engine may add weight gradients to `main_grad` within the product
    compiled_small_ops: bool = False  # torch's layers compile activation and rotation
    loss_chunk: int = 2048  # positions whose logits are in memory at a time
    gathers_tokens: bool = False  # expert-parallel ranks all-gather all tokens; else each token is sent (all-to-all)
    imbalance: float = 1.0  # rows of the busiest expert-parallel rank, relative to the mean
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    experts_alone: bool = False  # the layout of routed experts (`expert_layout`)

    @property
    def bytes_each(self) -> int:
        """Return the bytes of an activation or a weight."""
        return BYTES[self.precision]

    @property
    def sequence_shards(self) -> int:
        """Return the number of shards of activations between TP regions."""
        return self.dims.tp if self.sequence_parallel else 1

    @property
    def shards(self) -> int:
        """Return the number of DP × CP ranks that optimizer state (and more) is sharded over."""
        return 1 if self.sharding == "none" else self.shard_size or self.dims.dp_cp

    @property
    def regathering_ranks(self) -> int:
        """Return the number of ranks from which a backward pass gathers weights: `--secondary-shard-size`, or all."""
        return min(self.secondary or self.shards, self.shards)

    @cached_property
    def expert_layout(self) -> Scenario | None:
        """Return the scenario of the routed experts alone; None without routed experts.

        They are spread over EP · ETP neighbouring ranks of a stage. Ranks with the same experts sum their gradients and
        shard their optimizer state (expert data parallelism).
        """
        if not self.model.experts.num_experts or self.experts_alone:
            return None
        dims = self.dims
        alone = Dims(tp=dims.ep * dims.expert_tp, pp=dims.pp, vpp=dims.vpp, dp=dims.expert_dp)
        return replace(self, dims=alone, experts_alone=True)

    @property
    def layouts(self) -> tuple[Scenario, ...]:
        """Return the scenarios by which parameters are sharded: of all but routed experts, and of routed experts."""
        return (self,) if self.expert_layout is None else (self, self.expert_layout)

    @property
    def busiest(self) -> float:
        """Return the rows of the busiest rank's experts relative to the mean; 1 where each rank has all experts."""
        return self.imbalance if self.dims.ep > 1 else 1.0

    @property
    def sends_codes(self) -> bool:
        """Return whether gradients or weights are sent compressed, which excludes overlap with computation."""
        return (self.gradient_code, self.weight_code) != ("none", "none")

    @property
    def shards_gradients(self) -> bool:
        """Return whether gradients are sharded (ZeRO-2 and 3)."""
        return self.sharding in ("optimizer_gradients", "full")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of all layers."""
        return layer_names(self.model)

    def trains(self, name: str) -> bool:
        """Return whether a layer's own weights have gradients."""
        return name in self.own

    @cached_property
    def gradient_reaches(self) -> tuple[bool, ...]:
        """Return for each layer whether a layer before it is trained, so that its input needs a gradient."""
        return _gradient_reaches(self.names, self.trained)


@lru_cache(maxsize=256)
def _gradient_reaches(names: tuple[str, ...], trained: frozenset[str]) -> tuple[bool, ...]:
    return tuple(trained_below(name, names[:i], trained) for i, name in enumerate(names))


def encoder_scenario(scenario: Scenario, vision_tp: int) -> Scenario:
    """Return the scenario of a colocated encoder, with one copy on every `vision_tp` ranks."""
    dims = Dims(tp=vision_tp, dp=scenario.dims.world // vision_tp)
    sharding: Sharding = "none" if scenario.sharding == "none" else "optimizer"
    return replace(scenario, dims=dims, sharding=sharding, shard_size=None, sequence_parallel=vision_tp > 1)


def expert_imbalance(config: Config) -> float:
    """Return the assumed imbalance of experts: 1 where the configuration forces balanced routing."""
    return 1.0 if config.model.experts.router_force_load_balancing else EXPERT_IMBALANCE


def scenario_of(
    config: Config,
    dims: Dims,
    *,
    on_gpu: bool = False,
    colocated: bool | None = None,
    imbalance: float | None = None,
    like: Scenario | None = None,
) -> Scenario:
    """Return the scenario of a configuration with these degrees.

    `colocated` and `imbalance` override the values that follow from the configuration. `like` is the scenario of
    another layout of the same configuration: its sets of trained layers and of FP8 layers are taken over.
    """
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
        secondary=config.parallel.secondary_shard_size,
        overlap_grad_reduce=bool(overlapped(config, dp=dims.dp_cp).parallel.overlap_grad_reduce),
        gradient_bytes=BYTES["bf16" if config.parallel.grad_reduce_in_bf16 else "fp32"],
        gradient_code=config.parallel.compress_gradients,
        weight_code=config.parallel.compress_weights,
        code_group=config.parallel.compress_group_size or 1,
        **_layer_sets(config, like),
        lora=config.lora,
        fp8_recipe=config.precision.fp8_recipe,
        offload=offloaded(config),
        optimizer=config.optimizer.resolved(config.precision.dtype),
        moments_on_disk=moments_folder(config) is not None,
        on_gpu=on_gpu,
        te=on_gpu and config.execution.transformer_impl != "torch",
        fused_gradients=config.execution.gradient_accumulation_fusion,
        compiled_small_ops=config.execution.compile_small_ops,
        loss_chunk=config.execution.loss_chunk_tokens,
        gathers_tokens=config.parallel.moe_token_dispatcher_type == "allgather",
        imbalance=expert_imbalance(config) if imbalance is None else imbalance,
    )


def _layer_sets(config: Config, like: Scenario | None) -> dict[str, Any]:
    """Return the fields of a scenario that are sets of layers: no layout changes them."""
    if like is not None:
        return {name: getattr(like, name) for name in ("own", "trained", "adapted", "fp8", "kept_in_fp8")}
    names, trained = layer_names(config.model), trained_layers(config)
    own = frozenset(name for name in names if trains_weights(name, config))
    return {
        "own": own,
        "trained": trained,
        "adapted": frozenset(key for name in trained - own for key in kept_inputs(name, config)),
        "fp8": frozenset(name for name in names if layer_precision(name, config) == "fp8"),
        "kept_in_fp8": frozenset(name for name in names if keeps_fp8(name, config)),
    }
