"""Losses of preferences and their gradients are those of TRL's trainers, from the same logits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.arch.objectives import OBJECTIVES
from megavlm.config.schema import ObjectiveConfig
from megavlm.data.types import NEGATIVE, POSITIVE
from megavlm.objective.losses import preference_loss

ROOT = Path(__file__).parents[3]
TRL = ROOT / "build/trl"
pytestmark = pytest.mark.skipif(not TRL.exists(), reason="TRL is not installed: make trl-tools")

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
LENGTH, WORDS, PAIRS = 12, 11, 4
# Our options; TRL's trainer and what it calls otherwise.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "dpo": ({"kind": "dpo"}, "dpo", {"loss_types": ["sigmoid"]}),
    # `sigmoid` smooths no labels any more; `aot` does, and has nothing to sort in one pair. `robust` is another loss.
    "smoothed": ({"kind": "dpo", "label_smoothing": 0.1}, "dpo", {"loss_types": ["aot"]}),
    "rpo": ({"kind": "dpo", "rpo_alpha": 0.5}, "dpo", {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "ipo": ({"kind": "ipo"}, "dpo", {"loss_types": ["ipo"]}),
    "simpo": ({"kind": "simpo", "simpo_gamma": 0.3, "label_smoothing": 0.1}, "cpo", {"loss_type": "simpo"}),
    "cpo": ({"kind": "simpo", "simpo_gamma": 0.3, "rpo_alpha": 0.7}, "cpo", {"loss_type": "simpo", "cpo_alpha": 0.7}),
    "orpo": ({"kind": "orpo"}, "orpo", {}),
    "kto": ({"kind": "kto", "desirable_weight": 1.3}, "kto", {"loss_type": "apo_zero_unpaired"}),
}
REWARDS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "reward": ({"kind": "reward"}, "reward", {}),
    "margin": ({"kind": "reward"}, "reward", {}),
    "centered": ({"kind": "reward", "center_rewards": 0.3}, "reward", {"center_rewards_coefficient": 0.3}),
}
BETA = 0.4


def pair(seed: int, kind: str) -> dict[str, Tensor]:
    """Return two answers to a prompt, padded to different lengths. ORPO of TRL trains prompts: they have one token."""
    generator = torch.Generator().manual_seed(seed)
    prompt = 1 if kind == "orpo" else 2 + seed
    lengths = prompt + torch.randint(1, LENGTH - prompt, (2,), generator=generator)
    places = torch.arange(LENGTH)
    attended = (places < lengths[:, None]).long()
    return {
        "tokens": torch.randint(1, WORDS, (2, LENGTH), generator=generator) * attended,
        "attended": attended,
        "answer": attended * (places >= prompt),
        "reference": -2.0 * (lengths - prompt) + torch.randn(2, generator=generator, dtype=torch.float64),
        "logits": torch.randn(2, LENGTH, WORDS, generator=generator, dtype=torch.float64),
    }


def pairs_of(case: str) -> list[dict[str, Tensor]]:
    if case in REWARDS:
        generator = torch.Generator().manual_seed(3)
        scores = torch.randn(PAIRS, 2, 1, generator=generator, dtype=torch.float64)
        margins = torch.rand(PAIRS, 1, generator=generator)
        return [
            {"logits": each, **({"margin": margin} if case == "margin" else {})}
            for each, margin in zip(scores, margins, strict=True)
        ]
    return [pair(seed, CASES[case][1]) for seed in range(PAIRS)]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """The losses [P] of all cases, the gradients with respect to the logits, and what a reward trainer logs."""
    given, results = (tmp_path_factory.mktemp("trl") / name for name in ("given.pt", "results.pt"))
    cases = {
        case: (trainer, {**ours, **others, "beta": BETA}, pairs_of(case))
        for case, (ours, trainer, others) in {**CASES, **REWARDS}.items()
    }
    torch.save(cases, given)
    command = [sys.executable, "-m", "tests.support.trl_losses", str(given), str(results)]
    environment = os.environ | {"PYTHONPATH": str(TRL), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(results)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_trl(theirs: dict[str, tuple[Tensor, Tensor, Any]], case: str) -> None:
    """TRL computes the odds of ORPO in fp32."""
    pairs = pairs_of(case)
    tokens, answer, reference, logits = (
        torch.cat([each[name] for each in pairs]) for name in ("tokens", "answer", "reference", "logits")
    )
    logits.requires_grad_(True)
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    rows, places = answer[:, 1:].nonzero(as_tuple=True)
    text = SimpleNamespace(
        pool=(rows * (LENGTH - 1) + places, rows),
        members=torch.tensor([[row // 2, NEGATIVE if row % 2 else POSITIVE, row, 0] for row in range(2 * PAIRS)]),
        reference=reference,
    )
    options = ObjectiveConfig(**CASES[case][0], beta=BETA)
    total, count, _ = preference_loss(SimpleNamespace(text=text), 0, options, ALONE, losses)
    total.backward()
    expected, gradient, _ = theirs[case]
    assert int(count) == PAIRS * (2 if options.kind == "kto" else 1)
    assert total.item() == pytest.approx(expected.sum().item(), rel=1e-6)
    torch.testing.assert_close(logits.grad, gradient, rtol=0, atol=1e-6 * float(gradient.abs().max()))


@pytest.mark.parametrize("case", REWARDS)
def test_a_reward_head_is_trained_and_measured_as_by_trl(
    theirs: dict[str, tuple[Tensor, Tensor, Any]], case: str
) -> None:
    pairs = pairs_of(case)
    scores = torch.cat([each["logits"] for each in pairs])[:, 0].requires_grad_(True)
    margins = [each.get("margin", torch.zeros(1)) for each in pairs]
    text = SimpleNamespace(
        members=torch.tensor([[row // 2, NEGATIVE if row % 2 else POSITIVE, row, 0] for row in range(2 * PAIRS)]),
        reference=torch.cat([torch.cat([margin, torch.zeros(1)]) for margin in margins]).double(),
    )
    options = ObjectiveConfig(**REWARDS[case][0])
    total, count, sums = preference_loss(SimpleNamespace(text=text), 0, options, ALONE, scores)
    total.backward()
    expected, gradient, logged = theirs[case]
    assert total.item() == pytest.approx(expected.sum().item(), rel=1e-6)
    torch.testing.assert_close(scores.grad, gradient[:, 0], rtol=0, atol=1e-6 * float(gradient.abs().max()))
    means = OBJECTIVES["reward"].means(sums[2:].tolist(), float(count))
    assert means["reward_accuracy"] == pytest.approx(float(logged["accuracy"]))
    assert means["reward_margin"] == pytest.approx(float(logged["margin"]))
    assert means["reward_chosen"] + means["reward_rejected"] == pytest.approx(2 * float(logged["mean_reward"]))
