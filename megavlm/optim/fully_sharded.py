"""Shard a chunk's gradients (ZeRO-2), or weights too (ZeRO-3), over data-parallel ranks (Rajbhandari et al. 2020).

torch's `fully_shard` shards layer by layer: each rank holds some rows of each parameter in fp32 (master weights).
Rows are gathered in the model's type before a layer runs, and gradients are reduce-scattered after each backward pass
and summed in fp32. ZeRO-3 frees gathered parameters after each pass, ZeRO-2 after the step. With a secondary shard
(hpZ, Wang et al. 2023) ZeRO-3 keeps a part of them from a forward pass to its backward pass, which then gathers them
inside a node. Offloaded rows, with their gradients, are in pinned host memory, and cross the bus to be gathered. HSDP
shards within a group and sums the rows of all groups once a step.

A whole chunk is never built in memory: its parameters are on torch's `meta` device, without memory, until they are
sharded, and only one part at a time has memory while it is built (`on_meta`).

megatron-core's own wrapper of `fully_shard` supports GPT's layers only, averages gradients, and saves by name and rank:
it cannot save a number of rows that is not divisible by the number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer import FP32Optimizer, _get_param_groups
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from megavlm.arch.kinds import is_transformer
from megavlm.arch.layers import EMBEDDING, OUTPUT
from megavlm.arch.objectives import ties_output
from megavlm.backend.patches import resharding_among
from megavlm.config.derived import offloaded
from megavlm.config.schema import Config
from megavlm.model.specs import DTYPES
from megavlm.model.vlm import VLMChunk
from megavlm.optim.slow_links import compress_units
from megavlm.parallel.groups import Groups, Levels
from megavlm.parallel.shards import ShardLayout, local_part, rows_of, shard_layout

_REDUCED_AT_ONCE = 2**25  # elements that one all-reduce of HSDP sums


@torch.no_grad()
def on_meta(part: nn.Module, device: torch.device) -> None:
    """Move the buffers of a part to the device, and its parameters, with their attributes, to torch's `meta` device."""
    part.to(device)
    for module in part.modules():
        for name, param in module.named_parameters(recurse=False):
            empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            vars(empty).update(vars(param))
            setattr(module, name, empty)


class FullyShardedChunk(_BaseDataParallel):
    """Fully sharded chunk with the methods of megatron-core's `DistributedDataParallel`, in place of that.

    After `finish_grad_sync`, `main_grad` of each trained parameter is the fp32 gradient of the rows that this rank
    holds, as a plain tensor; callers may add to it and scale it in place.
    """

    def __init__(
        self,
        chunk: VLMChunk,
        config: Config,
        groups: Groups,
        *,
        device: torch.device,
        secondary: Levels | None = None,
        compressing: Levels | None = None,
    ) -> None:
        """Shard `chunk`, whose parameters are on `meta`; its rows are zeros afterwards, to be set through `shards`.

        `device` computes and communicates; rows may be on the host. `secondary`: levels of the shard group; inner ranks
        keep a secondary shard of weights. `compressing`: levels of the shard group; inner ranks sum exact gradients
        before codes are sent.
        """
        super().__init__(config=chunk.config, module=chunk)
        self.ddp_config = DistributedDataParallelConfig()  # megatron-core reads from it whether this is its own FSDP
        self.dtype = DTYPES[config.precision.dtype]
        self.groups = groups
        entries = chunk.sharded_state_dict()
        self.layouts = _layouts(chunk, entries, groups)
        given = {id(buffer) for buffer in chunk.buffers()}
        self._given = {name: entry for name, entry in entries.items() if id(entry.data) in given}  # whole on each rank
        self.device = device
        self.reduced_in = torch.bfloat16 if config.parallel.grad_reduce_in_bf16 else torch.float32
        self.rows_on_host = "parameters" in offloaded(config)
        self._drawn_in = {name: param.dtype for name, param in chunk.named_parameters()}
        attributes = {name: dict(vars(param)) for name, param in chunk.named_parameters()}
        keeps_whole = config.parallel.data_parallel_sharding == "optimizer_gradients"
        self._shard(chunk, keeps_whole=keeps_whole, secondary=secondary)
        self.coded_reductions, self._between = compress_units(self._sharded_modules(), config, groups, compressing)
        for name, param in chunk.named_parameters():  # fully_shard's new parameters lack the attributes for TP and ties
            vars(param).update(attributes[name])
            assert not param.is_meta, name
        self.trained = {name: param for name, param in chunk.named_parameters() if param.requires_grad}

    def _shard(self, chunk: VLMChunk, *, keeps_whole: bool, secondary: Levels | None) -> None:
        # fully_shard warns of in-place operations on a view that a module returns; no layer here has such operations.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view")
        device = self.device.type
        mesh = DeviceMesh.from_group(self.groups.shard, device)
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=self.reduced_in, cast_forward_inputs=False)
        place = CPUOffloadPolicy(pin_memory=device != "cpu") if self.rows_on_host else OffloadPolicy()
        units: list[nn.Module] = [*_units(chunk), chunk]
        resharding: Any = nullcontext()
        if secondary is not None:
            shard = self.groups.shard
            resharding = resharding_among(secondary.inside, secondary.across, shard=shard, device=device)
        with resharding:
            for unit in units:
                for param in unit.parameters():
                    if param.requires_grad:
                        param.data = param.data.float()
                fully_shard(
                    unit, mesh=mesh, mp_policy=policy, offload_policy=place, reshard_after_forward=not keeps_whole
                )
        rows_at = torch.device("cpu") if self.rows_on_host else self.device
        chunk._apply(lambda tensor: torch.zeros_like(tensor, device=rows_at) if tensor.is_meta else tensor)
        if isinstance(chunk.parts.get(OUTPUT), FSDPModule) and hasattr(chunk.parts[OUTPUT], "logits"):
            for method in ("logits", "statistics"):
                register_fsdp_forward_method(chunk.parts[OUTPUT], method)
        for module in self._sharded_modules():
            module.set_gradient_divide_factor(1.0)  # gradients are sums; they are divided by the number of tokens
            module.set_force_sum_reduction_for_comms(True)
            if keeps_whole:
                module.set_reshard_after_backward(False)

    def _sharded_modules(self) -> Iterator[FSDPModule]:
        return (module for module in self.module.modules() if isinstance(module, FSDPModule))

    def shards(self) -> Iterator[ShardedTensor]:
        """Yield this rank's rows, and buffers, as parts of global tensors; their data are views, to be set through."""
        for name, param in self.module.named_parameters():
            yield from self.layouts[name].parts(local_part(param))
        yield from self._given.values()

    @torch.no_grad()
    def round_weights(self) -> None:
        """Round this rank's fp32 rows to the types of the built chunk, so that all layouts start from equal weights."""
        for name, param in self.trained.items():
            rows = local_part(param)
            rows.copy_(rows.to(self._drawn_in[name]))

    def reshard(self) -> None:
        """Free gathered parameters, so that the model's parameters are only this rank's rows."""
        for module in self._sharded_modules():
            module.reshard()

    def zero_grad_buffer(self) -> None:
        for param in self.trained.values():
            param.grad = None
            vars(param).pop("main_grad", None)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Set `main_grad` after the step's last backward pass; with HSDP, all-reduce it over the replica group."""
        self.reshard()
        for param in self.trained.values():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            param.main_grad = local_part(param.grad)
        if self.groups.replicas is not None:
            every = [param.main_grad for param in self.trained.values()]
            for index, gradients in enumerate(_portions(every, _REDUCED_AT_ONCE)):
                together = torch.cat([gradient.flatten() for gradient in gradients]).to(self.device)
                if self._between is None:
                    dist.all_reduce(together, group=self.groups.replicas)
                else:
                    together = self._between.total(index, together, self.groups.replicas)
                for gradient, part in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
                    gradient.copy_(part.view_as(gradient))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return this rank's rows and buffers as parts of global tensors, in the model's type, as without sharding."""
        self.reshard()
        rows = {
            f"{prefix}{name}/{index}": part
            for name, param in self.module.named_parameters()
            for index, part in enumerate(self.layouts[name].parts(local_part(param).to(self.dtype)))
        }
        return rows | {f"{prefix}{name}": entry for name, entry in self._given.items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load frozen parameters and buffers. Trained rows are fp32 master weights, loaded with the optimizer."""
        self.reshard()
        frozen = ((name, param) for name, param in self.module.named_parameters() if name not in self.trained)
        for name, param in frozen:
            for index, part in enumerate(self.layouts[name].parts(local_part(param))):
                assert part.data is not None
                part.data.copy_(state_dict[f"{name}/{index}"])
        for name, entry in self._given.items():
            entry.data.copy_(state_dict[name])


class ShardedOptimizer(FP32Optimizer):
    """megatron-core optimizer for rows of sharded parameters; its update rule is set after construction.

    The gradient norm is summed over the ranks that together hold one model.
    """

    def __init__(
        self,
        chunks: Sequence[FullyShardedChunk],
        config: MegatronOptimizerConfig,
        overrides: Mapping[Any, Any],
        groups: Groups,
    ) -> None:
        param_groups = _get_param_groups(list(chunks), config, dict(overrides))
        inner = None  # a rank without trained parameters still takes part in the norm
        if param_groups:
            inner = torch.optim.Optimizer(param_groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        super().__init__(inner, config, lambda inner, config=None: inner.begin())
        self.chunks = chunks
        self.grad_stats_parallel_group = groups.collection.intra_dist_opt
        self.tp_group = groups.tp

    def prepare_grads(self) -> bool:
        return False  # they are where the optimizer looks for them, in fp32

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        return [local_part(gradient) for gradient in super().get_main_grads_for_grad_norm()]


def _layouts(chunk: VLMChunk, state: Mapping[str, Any], groups: Groups) -> dict[str, ShardLayout]:
    """Return the layout of this rank's future shard of each parameter, by name; `chunk` is not sharded yet."""
    entries = {id(entry.data): entry for entry in state.values()}
    replica = groups.replicas.rank() if groups.replicas is not None else 0
    rank, ranks = groups.shard.rank(), groups.shard.size()
    return {
        name: shard_layout(entries[id(param)], *rows_of(param.shape, rank=rank, ranks=ranks), replica=replica)
        for name, param in chunk.named_parameters()
    }


def _units(chunk: VLMChunk) -> Iterator[nn.Module]:
    """Yield the parts that are sharded as units of their own; other parts stay gathered while the chunk runs."""
    tied_here = ties_output(chunk.run_config.model) and {EMBEDDING, OUTPUT} <= chunk.parts.keys()
    for name, part in chunk.parts.items():
        if is_transformer(name) or (name in (EMBEDDING, OUTPUT) and not tied_here):
            yield part


def _portions(tensors: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, in groups that end once they have at least `size` elements."""
    group: list[Tensor] = []
    for tensor in tensors:
        group.append(tensor)
        if sum(each.numel() for each in group) >= size:
            yield group
            group = []
    if group:
        yield group
