"""Grouped experts against one after the other, and the router's balance losses token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.spec_utils import ModuleSpec

from megavlm.config.schema import ExpertsConfig
from megavlm.model.experts import GroupedExperts, Products, Rows, emulated
from megavlm.model.layer_modules import ACTIVATIONS, ActivationModule
from megavlm.model.router import RoutedRows, Router
from megavlm.model.vlm import VLMChunk
from megavlm.model.weights import initialize
from megavlm.precision.emulated import current_operands, rounded
from tests.support.flags import resolved

EXPERTS, HIDDEN, WIDTH = 4, 8, 16


def group(size: int = 1, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def experts_of(
    dtype: torch.dtype = torch.float32, *, local: int = EXPERTS, products: Products | None = None, **groups: Any
) -> GroupedExperts:
    collection: Any = SimpleNamespace(**{"ep": group(), "expt_tp": group(), "expt_dp": group(), **groups})
    config: Any = SimpleNamespace(hidden_size=HIDDEN, moe_ffn_hidden_size=WIDTH, params_dtype=dtype)
    activation = ModuleSpec(module=ActivationModule, params={"function": ACTIVATIONS["swiglu"]})
    made = GroupedExperts(local, config, activation=activation, pg_collection=collection, products=products)
    torch.manual_seed(3)
    for param in made.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 2, 4, 1), (0, 10, 0, 0), (0, 0, 0, 0), (5, 0, 0, 5)])
@pytest.mark.parametrize("multiple", [1, 16])
def test_experts_are_gated_mlps(counts, dtype, multiple):
    """Also where experts have no tokens: their gradients are zero, and exist; and where rows are aligned for FP8."""
    experts = experts_of(dtype, products=Products(multiple=multiple))
    tokens = torch.randn(sum(counts), HIDDEN, dtype=dtype, requires_grad=True)
    weights = torch.rand(sum(counts), requires_grad=True)
    ours, _ = experts(tokens, torch.tensor(counts), weights)
    ours.float().square().sum().backward()
    found = [x.grad.clone() for x in (experts.linear_fc1.weight, experts.linear_fc2.weight, tokens, weights)]
    for x in (experts.linear_fc1.weight, experts.linear_fc2.weight, tokens, weights):
        x.grad = None

    first, second = experts.linear_fc1.weight, experts.linear_fc2.weight
    parts = []
    for expert, (own, p) in enumerate(zip(tokens.split(counts), weights.split(counts), strict=True)):
        gate, up = (own @ first[expert].T).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        parts.append((inner * p[:, None]).to(dtype) @ second[expert].T)
    theirs = torch.cat(parts)
    theirs.float().square().sum().backward()
    expected = [x.grad for x in (experts.linear_fc1.weight, experts.linear_fc2.weight, tokens, weights)]
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(ours, theirs, **tolerance)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if other is None else other, **tolerance)


def test_each_expert_is_rounded_by_its_own_scales():
    """In FP8: rows, weights and gradients of an expert as if there were no other, however large those are."""
    operands = current_operands("hybrid", None)
    torch.manual_seed(0)
    weight = torch.randn(EXPERTS, WIDTH, HIDDEN) * torch.tensor([1.0, 100.0, 1e-3, 5.0])[:, None, None]
    counts = torch.tensor([16, 0, 32, 16])
    size = torch.tensor([1e-3, 1.0, 50.0, 1.0]).repeat_interleave(counts)[:, None]
    x, grad = torch.randn(64, HIDDEN) * size, torch.randn(64, WIDTH) / size
    x.requires_grad_()
    weight.requires_grad_()
    emulated(operands)(x, weight, Rows.of(counts, x.device)).backward(grad)
    for expert, (rows, own) in enumerate(zip(x.split(counts.tolist()), grad.split(counts.tolist()), strict=True)):
        high, low = rounded(own, operands.gradient), rounded(rows.detach(), operands.input)
        torch.testing.assert_close(weight.grad[expert], high.T @ low)
    first = rounded(grad[:16], operands.gradient) @ rounded(weight[0].detach(), operands.weight)
    torch.testing.assert_close(x.grad[:16], first)


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (2, 2)])
def test_each_expert_is_drawn_by_itself(ep, etp):
    """Experts begin with different weights, and a rank draws its own as one process does."""

    def drawn(experts: GroupedExperts) -> list[torch.Tensor]:
        chunk: Any = SimpleNamespace(
            sharded_state_dict=lambda: experts.sharded_state_dict("language.layers.0.mlp.experts.")
        )
        chunk.shards = lambda: VLMChunk.shards(chunk)
        initialize(chunk, resolved(["--num-experts", str(EXPERTS)]), vocab_size=1)
        return [experts.linear_fc1.weight.detach(), experts.linear_fc2.weight.detach()]

    whole = drawn(experts_of())
    assert all(not one[first].equal(one[other]) for one in whole for first in range(EXPERTS) for other in range(first))
    for place in range(ep * etp):
        groups = {"ep": group(ep, place // etp), "expt_tp": group(etp, place % etp)}
        fc1, fc2 = drawn(experts_of(local=EXPERTS // ep, **groups))
        own = slice(place // etp * EXPERTS // ep, (place // etp + 1) * EXPERTS // ep)
        gate_and_up = [half.chunk(etp, dim=1)[place % etp] for half in whole[0][own].chunk(2, dim=1)]
        assert fc1.equal(torch.cat(gate_and_up, dim=1))
        assert fc2.equal(whole[1][own].chunk(etp, dim=2)[place % etp])


ROUTED, WIDE, LENGTH, ROWS = 6, 8, 10, 2
TOKENS, TRAINED = (10, 7), (4, 3)  # the second row ends with padding


def router_of(**options: Any) -> Router:
    """Return a router with random weights, in one process, that expects a micro-batch of two rows."""
    config: Any = SimpleNamespace(hidden_size=WIDE, params_dtype=torch.float32, sequence_parallel=False)
    alone: Any = SimpleNamespace(size=lambda: 1)
    groups: Any = SimpleNamespace(tp=alone, tp_cp=alone)
    router = Router(config, groups, experts=ExpertsConfig(num_experts=ROUTED, **options))
    torch.manual_seed(1)
    torch.nn.init.normal_(router.weight)
    tokens = torch.tensor(TOKENS, dtype=torch.float32)
    counted = (torch.arange(LENGTH)[:, None] < tokens).float()
    router.rows = RoutedRows(counted, tokens, torch.tensor(TRAINED, dtype=torch.float32))
    return router


def hidden_states() -> torch.Tensor:
    return torch.randn(LENGTH, ROWS, WIDE, generator=torch.Generator().manual_seed(2), requires_grad=True)


def scores_of(router: Router, token: torch.Tensor, *, kind: str) -> torch.Tensor:
    logits = router.weight @ token
    return logits.softmax(0) if kind == "softmax" else logits.sigmoid() / logits.sigmoid().sum()


def test_scores_are_computed_in_fp32_whatever_weights_and_tokens_are_in():
    """In bf16, steps of 2⁻⁸ between logits would make a token's scores wrong in the third digit."""
    router, hidden = router_of().to(torch.bfloat16), (4 * hidden_states()).to(torch.bfloat16)
    weights, chosen = router(hidden)
    assert weights.dtype == torch.float32
    logits = hidden.detach().flatten(0, 1).double() @ router.weight.detach().double().T
    expected = logits.where(chosen, -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "trained"), [("softmax", True), ("sigmoid", True), ("softmax", False)])
def test_the_balance_losses_are_those_of_the_definition(kind, trained):
    """Gradients of weight, unless frozen, and input, and what is reported, by loops over rows, tokens and experts."""
    aux, z, k = 0.3, 0.2, 2
    router, hidden = router_of(aux_loss_coeff=aux, z_loss_coeff=z, router_score_function=kind), hidden_states()
    router.weight.requires_grad_(trained)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    weights, chosen = router(hidden)
    weights.sum().backward()  # a constant but for the balance losses: the weights of a token sum to 1
    ours, of_input = router.weight.grad, hidden.grad
    router.weight.grad = hidden.grad = None

    choice = chosen.view(LENGTH, ROWS, ROUTED)
    total, balances, zs = torch.zeros(()), 0.0, 0.0
    for row, (count, terms) in enumerate(zip(TOKENS, TRAINED, strict=True)):
        balance = torch.zeros(())
        for expert in range(ROUTED):
            taken = sum(int(choice[t, row, expert]) for t in range(count))
            score = sum(scores_of(router, hidden[t, row], kind=kind)[expert] for t in range(count))
            balance = balance + ROUTED / (k * count) * taken * score / count
        logs = sum((router.weight @ hidden[t, row]).logsumexp(0) ** 2 for t in range(count)) / count
        total = total + terms * (aux * balance + z * logs)
        balances, zs = balances + terms * balance.item(), zs + terms * logs.item()
    total.backward()
    assert (ours is None) == (not trained)
    torch.testing.assert_close(ours, router.weight.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(of_input, hidden.grad, rtol=1e-4, atol=1e-5)
    load = [sum(int(choice[t, row, e]) for row in range(ROWS) for t in range(TOKENS[row])) for e in range(ROUTED)]
    torch.testing.assert_close(router.tally.float(), torch.tensor([*load, balances, zs]), rtol=1e-5, atol=1e-5)


def test_evaluations_and_first_passes_of_recomputed_layers_are_not_counted():
    router = router_of(aux_loss_coeff=1.0)
    with torch.no_grad():
        router(hidden_states())
    router.eval()(hidden_states())
    assert router.tally.count_nonzero() == 0


def test_the_bias_moves_towards_an_even_load():
    router = router_of(router_score_function="sigmoid", router_enable_expert_bias=True, router_bias_update_rate=0.5)
    router.update_bias(torch.tensor([9.0, 0.0, 3.0, 3.0, 3.0, 0.0]))
    assert router.expert_bias.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.0, 0.5]
