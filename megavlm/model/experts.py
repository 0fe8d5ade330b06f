"""Routed experts of a rank: gated MLPs, computed as two grouped matrix products.

torch's `grouped_mm` runs on every device, so CPUs compute the same as GPUs; FP8 has other products (`emulated`,
`te_product`) of the same weights. Rows are those of expert 0, then those of expert 1, …; an expert without tokens has
no rows, and its gradient is zero. A checkpoint has one tensor for all experts of a layer, as with megatron-core's own
experts, whatever their number per rank:

    linear_fc1.weight [E, 2F, H]   gate rows, then up rows, of each expert
    linear_fc2.weight [E, H, F]

and biases of these rows in some models; ETP divides both.
EP divides experts, and ETP divides F of each. Legend: T tokens on this rank, E experts (of it), F width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megavlm.arch.dims import Dims
from megavlm.config.schema import Config
from megavlm.model.router import Router
from megavlm.model.weight_gradients import WeightGradients, product_leaving_gradient
from megavlm.precision.emulated import Operands, Round, Scaling


@dataclass(frozen=True, eq=False)
class Rows:
    """Number of rows of each expert in a tensor [T, …] whose rows are ordered by expert."""

    counts: Tensor  # [E] int64, on the dispatcher's device
    ends: Tensor  # [E] int32 on the device: where each expert's rows end

    @classmethod
    def of(cls, counts: Tensor, device: torch.device) -> Rows:
        """Return the rows with these counts, with their ends on `device`."""
        return cls(counts, counts.to(device, non_blocking=True).cumsum(0).to(torch.int32))

    def each(self, of_expert: Tensor, total: int) -> Tensor:
        """Return for each of the `total` rows that of its expert in a tensor [E, …]."""
        return of_expert.repeat_interleave(self.counts.to(of_expert.device), dim=0, output_size=total)

    def aligned(self, multiple: int, total: int) -> tuple[Rows, Tensor]:
        """Return `Rows` padded to a multiple for each expert, and the places of the `total` real rows among them."""
        padded = -(-self.counts // multiple) * multiple
        before = (padded - self.counts).cumsum(0) - (padded - self.counts)  # empty rows of the experts before
        device = self.ends.device
        shift = before.to(device).repeat_interleave(self.counts.to(device), output_size=total)
        return Rows.of(padded, device), torch.arange(total, device=device) + shift


# x [T, columns], weight [E, rows, columns] → [T, rows], each row of x with its expert's weight.
Product = Callable[[Tensor, Tensor, Rows], Tensor]


def grouped(x: Tensor, weight: Tensor, rows: Rows) -> Tensor:
    """Return the product of each row of x with the weight of its expert, by torch's `grouped_mm`."""
    return F.grouped_mm(x, weight.transpose(1, 2), offs=rows.ends)


@dataclass(frozen=True)
class Products:
    """Factory of the two products of a layer's experts, and the alignment of rows that they need."""

    make: Callable[[int, int, int], Product] = lambda experts, rows, columns: grouped
    multiple: int = 1  # rows of each expert are padded to a multiple of this


def mark(param: nn.Parameter) -> nn.Parameter:
    """Mark a parameter as one of experts and return it.

    Its gradient is summed over expert-data-parallel ranks; all other ranks hold other weights, which the gradient norm
    counts once each. megatron-core marks experts only if EP > 1; with EP 1 and ETP ≠ TP their gradients would be summed
    over the wrong ranks.
    """
    marked: Any = param
    marked.allreduce = False
    marked.tensor_model_parallel, marked.partition_dim, marked.partition_stride = True, 0, 1
    return param


class ExpertWeight(nn.Module):
    """The weights [E, rows, columns] of all experts of a rank for one linear layer."""

    weight_gradients: WeightGradients | None = None

    def __init__(self, *shape: int, config: TransformerConfig, products: Products, biases: int = 0) -> None:
        super().__init__()
        self.product = products.make(*shape)
        self.weight = mark(nn.Parameter(torch.empty(shape, dtype=config.params_dtype)))
        self.bias = mark(nn.Parameter(torch.zeros(shape[0], biases, dtype=config.params_dtype))) if biases else None

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Return the product [T, rows] of x [T, columns] with the weights of each row's expert."""

        def product(x: Tensor, weight: Tensor) -> Tensor:
            return self.product(x, weight, rows)

        return product_leaving_gradient(product, x, self.weight, self.weight_gradients)


class GroupedExperts(MegatronModule):
    """Experts of a rank: fc2(activation(fc1(x)) · p) for each token's expert, with the router's weight p."""

    def __init__(
        self,
        experts: int,
        config: TransformerConfig,
        *,
        activation: Any,
        pg_collection: ProcessGroupCollection,
        products: Products | None = None,
        biases: bool = False,
    ) -> None:
        """Build the experts of this rank, `experts` in number."""
        super().__init__(config)
        assert config.moe_ffn_hidden_size is not None
        self.groups = pg_collection
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        products = products or Products()
        self.multiple = products.multiple
        given: dict[str, Any] = {"config": config, "products": products}
        first, second = 2 * width * biases, config.hidden_size // pg_collection.expt_tp.size() * biases
        self.linear_fc1 = ExpertWeight(experts, 2 * width, config.hidden_size, biases=first, **given)
        self.linear_fc2 = ExpertWeight(experts, config.hidden_size, width, biases=second, **given)
        self.activation = build_module(activation, config=config)

    def forward(self, tokens: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Return the outputs [T, H], which must still be summed over ETP ranks, and None for the bias.

        Args:
            tokens: [T, H], ordered by expert.
            counts: [E] int64: number of tokens of each expert.
            weights: [T] float32: the router's weight of each token.
        """
        rows = Rows.of(counts, tokens.device)
        if self.multiple == 1:
            return self._mlp(tokens, rows, weights), None
        aligned, places = rows.aligned(self.multiple, len(tokens))
        count = int(aligned.counts.sum())
        tokens, weights = (x.new_zeros(count, *x.shape[1:]).index_copy(0, places, x) for x in (tokens, weights))
        return self._mlp(tokens, aligned, weights)[places], None

    def _mlp(self, tokens: Tensor, rows: Rows, weights: Tensor) -> Tensor:
        inner = self.linear_fc1(tokens, rows)
        if self.linear_fc1.bias is not None:
            inner = inner + rows.each(self.linear_fc1.bias, len(tokens))
        inner = self.activation(inner)
        output = self.linear_fc2((inner * weights[:, None]).to(inner.dtype), rows)
        if self.linear_fc2.bias is None:
            return output
        own = (rows.each(self.linear_fc2.bias, len(tokens)) * weights[:, None]).to(output.dtype)
        before = self.groups.expt_tp.rank() * own.shape[1]  # outputs of ETP ranks are summed: each adds a part
        return output + F.pad(own, (before, output.shape[1] - before - own.shape[1]))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weights as shards of tensors that hold the experts of all ranks."""
        return {
            f"{prefix}{name}": self._entry(name, f"{prefix}experts.{name}", param)
            for name, param in self.named_parameters()
        }

    def _entry(self, name: str, key: str, param: Tensor) -> ShardedTensor | ShardedTensorFactory:
        """Return the shard of a parameter: rows of fc1, columns of fc2. An adapter's other factor is replicated."""
        ep, etp, replica = self.groups.ep, self.groups.expt_tp, (0, 0, self.groups.expt_dp.rank())
        linear, leaf = name.split(".")[0], name.rpartition(".")[2]
        if (linear, leaf) in (("linear_fc1", "A"), ("linear_fc2", "B")):
            copy = (0, etp.rank(), replica[2])
            return ShardedTensor.from_rank_offsets(key, param, (0, ep.rank(), ep.size()), replica_id=copy)
        if linear == "linear_fc1":
            return ShardedTensorFactory(key, param, self._gate_and_up, _merge, replica)
        return self._part(key, param, replica, axis=param.dim() - 1, part=0, parts=1)

    def _gate_and_up(self, key: str, data: Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
        halves = enumerate(data.chunk(2, dim=1))
        return [self._part(key, half, replica, axis=1, part=part, parts=2) for part, half in halves]

    def _part(self, key: str, data: Tensor, replica: Any, *, axis: int, part: int, parts: int) -> ShardedTensor:
        """Return this rank's shard of part number `part` of `parts` along the axis that ETP shards."""
        ep, etp = self.groups.ep, self.groups.expt_tp
        place = (axis, part * etp.size() + etp.rank(), parts * etp.size())
        return ShardedTensor.from_rank_offsets(key, data, (0, ep.rank(), ep.size()), place, replica_id=replica)


def _merge(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=1)


def emulated(by: Operands) -> Product:
    """Return the product in emulated FP8 with the current scalings in `by`.

    Rows, weights and output gradients of each expert are rounded by their own scales, as by Transformer Engine, whose
    kernels see one expert at a time. Delayed scaling is not offered: an expert's history would have to move with it
    from rank to rank. Experts without rows have no scale.
    """

    def rounded(x: Tensor, sizes: int | list[int], scaling: Scaling) -> Tensor:
        return torch.cat([Round.apply(part, scaling, None, False) for part in x.split(sizes)])

    def product(x: Tensor, weight: Tensor, rows: Rows) -> Tensor:
        sizes = rows.counts.tolist()
        outputs = grouped(rounded(x, sizes, by.input), rounded(weight, 1, by.weight), rows)
        return torch.cat([Round.apply(part, None, by.gradient, True) for part in outputs.split(sizes)])

    return product


@cache
def grouped_linear(base: type) -> type:
    """Return a subclass of Transformer Engine's `GroupedLinear` (or a test's stand-in) that takes weights as input."""

    class GroupedProduct(base):  # type: ignore[misc, unused-ignore]
        def __init__(self, experts: int, rows: int, columns: int) -> None:
            super().__init__(experts, columns, rows, bias=False, init_method=lambda weight: None)
            for name in self._views():
                delattr(self, name)
            # megatron-core sets it before a step's first pass: FP8 weights are kept through the step.
            self.is_first_microbatch = True

        def _views(self) -> list[str]:
            return [f"weight{number}" for number in range(self.num_gemms)]

        def forward(self, x: Tensor, weight: Tensor, rows: Rows) -> Tensor:
            self.__dict__.update(zip(self._views(), weight.unbind(), strict=True))
            output: Tensor = super().forward(x, rows.counts.tolist(), is_first_microbatch=self.is_first_microbatch)
            for name in self._views():  # they hold the graph of this pass
                del self.__dict__[name]
            self.is_first_microbatch = False
            return output

    return GroupedProduct


def te_product(experts: int, rows: int, columns: int) -> Product:
    """Return Transformer Engine's product in FP8 with weights [experts, rows, columns].

    Its module has a parameter for each expert. Here a rank's experts are one parameter, as with torch's products, so
    that checkpoints, initial weights, data parallelism and adapters need no special case, and the module gets views of
    it. Written against Transformer Engine 2.11, whose kernels take experts without rows, and rows in multiples of 16.
    """
    from transformer_engine.pytorch import GroupedLinear

    return grouped_linear(GroupedLinear)(experts, rows, columns)


class ExpertsWithNorms(MoELayer):
    """Experts and a shared expert, each with norms of its inputs and outputs; the router gets the layer's input."""

    def __init__(self, config: TransformerConfig, *args: Any, norm: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        given: dict[str, Any] = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.input_norm, self.output_norm = (build_module(norm, **given) for _ in range(2))
        self.shared_input_norm, self.shared_output_norm = (build_module(norm, **given) for _ in range(2))

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        return self.shared_output_norm(self.shared_experts(self.shared_input_norm(hidden_states)))

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        return super().preprocess(self.input_norm(hidden_states), probs, routing_map)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        routed: Tensor = self.output_norm(super().postprocess(output, None))
        return routed if shared_expert_output is None else routed + shared_expert_output


def with_experts(layer_config: TransformerConfig, config: Config, dims: Dims) -> TransformerConfig:
    """Return the configuration of a layer with experts, for megatron-core's layer and token dispatchers."""
    experts = config.model.experts
    return replace(
        layer_config,
        num_moe_experts=experts.num_experts,
        moe_ffn_hidden_size=experts.ffn_hidden_size,
        moe_router_topk=experts.router_topk,
        moe_router_score_function=experts.router_score_function,
        moe_router_pre_softmax=experts.router_pre_softmax,
        moe_shared_expert_intermediate_size=experts.shared_ffn_hidden_size,
        moe_shared_expert_gate=experts.shared_gate,
        moe_token_dispatcher_type=config.parallel.moe_token_dispatcher_type,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=dims.expert_tp,
    )


def experts_spec(modules: Any, config: Config, dense: MLPSubmodules) -> ModuleSpec:
    """Return the spec of a router with its experts. A shared expert is an MLP like those of `dense` layers."""
    activation, biases = dense.activation_func, config.model.experts.add_bias
    submodules = MoESubmodules(
        router=partial(Router, experts=config.model.experts),
        experts=ModuleSpec(
            module=GroupedExperts, params={"activation": activation, "products": modules.products, "biases": biases}
        ),
        shared_experts=ModuleSpec(
            module=SharedExpertMLP, submodules=replace(dense, linear_fc1=modules.column_linear_alone)
        ),
    )
    if config.model.experts.own_norms:
        return ModuleSpec(module=ExpertsWithNorms, submodules=submodules, params={"norm": modules.norm_alone})
    return ModuleSpec(module=MoELayer, submodules=submodules)
