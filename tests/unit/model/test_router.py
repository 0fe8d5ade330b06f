"""The router's balance losses against plain definitions, token by token; `tests/parity` has its choices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megavlm.config.schema import ExpertsConfig
from megavlm.model.router import RoutedRows, Router

EXPERTS, HIDDEN, LENGTH, ROWS = 6, 8, 10, 2
TOKENS, TRAINED = (10, 7), (4, 3)  # the second row ends with padding


def router_of(**options: Any) -> Router:
    """Return a router with random weights, in one process, that expects a micro-batch of two rows."""
    config: Any = SimpleNamespace(hidden_size=HIDDEN, params_dtype=torch.float32, sequence_parallel=False)
    alone: Any = SimpleNamespace(size=lambda: 1)
    groups: Any = SimpleNamespace(tp=alone, tp_cp=alone)
    router = Router(config, groups, experts=ExpertsConfig(num_experts=EXPERTS, **options))
    torch.manual_seed(1)
    torch.nn.init.normal_(router.weight)
    tokens = torch.tensor(TOKENS, dtype=torch.float32)
    counted = (torch.arange(LENGTH)[:, None] < tokens).float()
    router.rows = RoutedRows(counted, tokens, torch.tensor(TRAINED, dtype=torch.float32))
    return router


def hidden_states() -> torch.Tensor:
    return torch.randn(LENGTH, ROWS, HIDDEN, generator=torch.Generator().manual_seed(2), requires_grad=True)


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


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_balance_losses_are_those_of_the_definition(kind):
    """Gradients of weight and input, and what is reported, by loops over rows, tokens and experts."""
    aux, z, k = 0.3, 0.2, 2
    router, hidden = router_of(aux_loss_coeff=aux, z_loss_coeff=z, router_score_function=kind), hidden_states()
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    weights, chosen = router(hidden)
    weights.sum().backward()  # a constant but for the balance losses: the weights of a token sum to 1
    ours, router.weight.grad, of_input = router.weight.grad.clone(), None, hidden.grad.clone()
    hidden.grad = None

    choice = chosen.view(LENGTH, ROWS, EXPERTS)
    total, balances, zs = torch.zeros(()), 0.0, 0.0
    for row, (count, trained) in enumerate(zip(TOKENS, TRAINED, strict=True)):
        balance = torch.zeros(())
        for expert in range(EXPERTS):
            taken = sum(int(choice[t, row, expert]) for t in range(count))
            score = sum(scores_of(router, hidden[t, row], kind=kind)[expert] for t in range(count))
            balance = balance + EXPERTS / (k * count) * taken * score / count
        logs = sum((router.weight @ hidden[t, row]).logsumexp(0) ** 2 for t in range(count)) / count
        total = total + trained * (aux * balance + z * logs)
        balances, zs = balances + trained * balance.item(), zs + trained * logs.item()
    total.backward()
    torch.testing.assert_close(ours, router.weight.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(of_input, hidden.grad, rtol=1e-4, atol=1e-5)
    load = [sum(int(choice[t, row, e]) for row in range(ROWS) for t in range(TOKENS[row])) for e in range(EXPERTS)]
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
