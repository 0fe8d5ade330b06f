"""Compute what TRL's trainers make of given logits: `python -m tests.support.trl_losses CASES RESULTS`.

It is a process of its own, because `make trl-tools` brings packages that no other test shall find.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The newest version, 1.16.0. Its losses of DPO and KTO are parts of a method that begins with the model, so trainers
# are made without arguments, and SETTINGS are the attributes that their methods read.
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

TRAINERS = {"dpo": DPOTrainer, "kto": KTOTrainer, "cpo": CPOTrainer, "orpo": ORPOTrainer, "reward": RewardTrainer}
SETTINGS = {
    **{"aux_loss_enabled": False, "label_smoothing": 0.0, "_total_train_tokens": 0, "_tp_size": 1},
    **{"precompute_ref_logps": True, "ld_alpha": None, "f_divergence_type": "reverse_kl", "use_weighting": False},
    **{"loss_weights": [1.0], "calculate_KL": False, "undesirable_weight": 1.0},
    **{"is_encoder_decoder": False, "pad_token_id": 0, "padding_value": 0, "alpha": 0.0, "cpo_alpha": 0.0},
}
LOGGED = ("accuracy", "margin", "mean_reward")


class Model:
    """A model that answers with given logits [2, S, V]; with labels also as models do that TRL has patched."""

    training = True

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def __call__(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Model:
        if labels is not None:
            self.log_probs = -F.cross_entropy(self.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
            self.entropy = self.mean_logits = self.log_probs.detach()
            self.is_top1 = self.log_probs > -1.0
        return self


def loss_of_pair(
    kind: str, settings: dict[str, Any], logits: Tensor, pair: dict[str, Tensor], seen: dict[str, list[Any]]
) -> Tensor:
    """Return the loss of one pair, or the sum of both if they are rated: a good answer in row 0, and a bad one.

    `logits` are [2, S, V]; `pair` has tokens, attended and answer [2, S] and the reference's log-probabilities [2].
    Of a reward model `logits` are scores [2, 1], and `pair` may have a margin. `seen` gets what the trainer logs.
    """
    trainer, model = object.__new__(TRAINERS[kind]), Model(logits)
    accelerator = SimpleNamespace(device=logits.device, gather=lambda each: each, gather_for_metrics=lambda each: each)
    metrics: dict[str, Any] = {"train": seen}
    vars(trainer).update({**SETTINGS, **settings, "model": model, "accelerator": accelerator, "_metrics": metrics})
    if kind == "reward":
        trainer.args = SimpleNamespace(center_rewards_coefficient=settings.get("center_rewards_coefficient"))
        return trainer.compute_loss(model, {"attention_mask": torch.ones(2, 1), **pair})
    tokens, attended, answer, reference = (pair[name] for name in ("tokens", "attended", "answer", "reference"))
    if kind in ("cpo", "orpo"):
        labels = tokens.where(answer == 1, -100)
        batch = {
            f"{name}_{part}": values[row : row + 1]
            for row, name in enumerate(("chosen", "rejected"))
            for part, values in {"input_ids": tokens, "attention_mask": attended, "labels": labels}.items()
        }
        return trainer.get_batch_loss_metrics(model, batch)[0]
    batch = {"input_ids": tokens, "attention_mask": attended, "completion_mask": answer}
    if kind == "kto":
        return 2 * trainer._compute_loss(model, batch | {"label": torch.tensor([1, 0]), "ref_logps": reference}, False)
    references = {"ref_chosen_logps": reference[:1], "ref_rejected_logps": reference[1:]}
    return trainer._compute_loss(model, batch | references, False)


def main(given: Path, results: Path) -> None:
    found = {}
    for name, (kind, settings, pairs) in torch.load(given).items():
        rows = [pair.pop("logits").requires_grad_(True) for pair in pairs]
        seen = defaultdict[str, list[Any]](list)
        losses = [loss_of_pair(kind, settings, logits, pair, seen) for logits, pair in zip(rows, pairs, strict=True)]
        torch.stack(losses).sum().backward()
        logged = {each: torch.tensor(seen[each]).mean() for each in LOGGED if kind == "reward"}
        found[name] = torch.stack(losses).detach(), torch.cat([logits.grad for logits in rows]), logged
    torch.save(found, results)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
