"""Language layers whose MLP is a mixture: a router sends each token to `top-k` of E experts, beside a shared one.

The routed experts are shared by EP · ETP neighbouring ranks: EP divides their number, ETP the width of each. Tensor
parallelism divides the rest of the layer. Between attention and experts a rank has t = T / TP tokens of its own, which
it sends to the ranks of their experts and receives back (all-to-all), so that no rank computes a token twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megavlm.arch.kind import FP32, Communication, Exchange, LayerCost
from megavlm.arch.matrices import HiddenWeight, hidden_weight
from megavlm.arch.scenario import Scenario
from megavlm.arch.tensor_split import share_of
from megavlm.arch.transformer import LanguageLayer, LanguageLayerSizes, LayerSizes, RoutedRows, mlp_weights
from megavlm.arch.workload import Workload
from megavlm.config.schema import ModelConfig


class MixtureLayer(LanguageLayer):
    cpu_calls = 60  # sorting, and three products for each expert: not measured

    def mlp_parameters(self, model: ModelConfig, ffn: int) -> int:
        """Return those of the shared expert, and of router and gate, which are whole on every rank."""
        whole = model.experts.num_experts + model.experts.shared_gate
        return super().mlp_parameters(model, ffn) + whole * model.language.hidden_size

    def mlp_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        """Return the router's matrix, those of each expert, and the shared expert's; its gate is a vector."""
        experts, hidden = model.experts, model.language.hidden_size
        count, shared = experts.num_experts, experts.shared_ffn_hidden_size
        return {
            "mlp.router.weight": hidden_weight(hidden, count),
            **mlp_weights("mlp.experts.experts", hidden, experts.ffn_hidden_size, gates=2, experts=count),
            **(mlp_weights("mlp.shared_experts", hidden, shared, gates=2) if shared else {}),
        }

    def mlp_width(self, model: ModelConfig) -> int:
        return model.experts.shared_ffn_hidden_size or 0

    def mlp_share(self, model: ModelConfig, tp: int) -> int:
        """Return the shared expert's width on a rank, which is not padded."""
        return share_of(self.mlp_width(model), tp)

    def expert_parameters(self, model: ModelConfig, ranks: int) -> int:
        return model.experts.num_experts * _expert_weights(model) // ranks

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        rest = super().cost(model, work, number)
        routed = 2.0 * model.experts.router_topk * _expert_weights(model) * work.tokens
        parameters = rest.parameters + self.expert_parameters(model, 1)
        return LayerCost(parameters, rest.forward_flops + routed, rest.attention_flops, routed)

    def sizes(self, scenario: Scenario) -> LayerSizes:
        return _MixtureSizes(scenario)

    def communication(self, scenario: Scenario) -> Communication:
        """Return a gather and a reduction around attention, and around a shared expert; routed ones have exchanges of
        their own.
        """
        usual, blocks = super().communication(scenario), 1 + bool(scenario.model.experts.shared_ffn_hidden_size)
        return replace(usual, gathers=usual.gathers[:blocks], reductions=usual.reductions[:blocks])

    def expert_exchange(self, scenario: Scenario) -> tuple[Exchange, ...]:
        """Return what brings tokens to their experts and back.

        All-to-all: each row goes to the rank of its expert, whose ETP ranks then gather one another's rows and sum
        their outputs. Gathered: all tokens go to all ranks, once, and outputs are summed.
        """
        sizes, dims = self.sizes(scenario), scenario.dims
        assert sizes.routed is not None
        row, ranks = sizes.hidden * scenario.bytes_each, dims.ep * dims.expert_tp
        if scenario.gathers_tokens:
            tokens = sizes.tokens / scenario.sequence_shards
            return (Exchange(ranks, 1, ranks * tokens * row, to_each=False),) * (2 if ranks > 1 else 0)
        sent = Exchange(dims.ep, dims.expert_tp, sizes.routed.moved * row, to_each=True)
        gathered = Exchange(dims.expert_tp, 1, sizes.routed.rows * row, to_each=False)
        return tuple(each for each in (sent, gathered, gathered, sent) if each.ranks > 1)


class _MixtureSizes(LanguageLayerSizes):
    """Sizes of a layer whose MLP is the shared expert, and of the rows that its routed experts compute."""

    def __init__(self, scenario: Scenario) -> None:
        model, dims = scenario.model, scenario.dims
        super().__init__(model.language, scenario)
        experts = model.experts
        self.ffn = share_of(experts.shared_ffn_hidden_size or 0, dims.tp)
        moved = self.tokens / scenario.sequence_shards * experts.router_topk * scenario.busiest
        self.routed = RoutedRows(
            rows=moved * dims.expert_tp,
            experts=experts.num_experts // dims.ep,
            hidden=self.hidden,
            ffn=experts.ffn_hidden_size / dims.expert_tp,
            moved=moved,
        )

    def saved(self, *, trained: bool, core_attention: bool) -> float:
        """Return what a layer keeps whose MLP is the shared expert, and beside it, of each row, what both products and
        the activation read, its output, a weight and a place; of each token, the router's choice and scores.
        """
        rest, routed = super().saved(trained=trained, core_attention=core_attention), self.routed
        assert routed is not None
        scenario, experts = self.scenario, self.scenario.model.experts
        wide = (routed.hidden + routed.ffn) * trained + (self.inner + 1) * routed.ffn
        rows = routed.rows * (wide * scenario.bytes_each + FP32 + 8)
        losses = trained * (bool(experts.aux_loss_coeff) + bool(experts.z_loss_coeff))
        choice = experts.num_experts * (1 + FP32 * (1 + losses)) + experts.router_topk * (8 + FP32)
        return rest + rows + self.tokens / scenario.sequence_shards * choice

    def waiting(self) -> float:
        routed = self.routed
        assert routed is not None
        inputs, outputs = routed.hidden + routed.ffn, self.inner * routed.ffn + routed.hidden
        return super().waiting() + routed.rows * (inputs + outputs) * self.scenario.bytes_each


def _expert_weights(model: ModelConfig) -> int:
    """Return the weights of one expert: gate, up and down."""
    return 3 * model.language.hidden_size * model.experts.ffn_hidden_size
