"""What every benchmark asks of Transformers: the sizes of its language models, and the optimizer beside them."""

from __future__ import annotations

from typing import Any

import torch

from megavlm.config.schema import LanguageConfig, OptimizerConfig

OPTIMIZER = OptimizerConfig(lr=1e-4, lr_decay_style="constant", weight_decay=0.01, clip_grad=1.0)  # of both sides


def text_sizes(language: LanguageConfig, *, vocabulary: int) -> dict[str, Any]:
    """Fields of a Llama-like configuration."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": language.hidden_size,
        "intermediate_size": language.ffn_hidden_size,
        "num_hidden_layers": language.num_layers,
        "num_attention_heads": language.num_attention_heads,
        "rms_norm_eps": language.norm_epsilon,
        "use_cache": False,
    }


def their_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """torch's AdamW, fused (the fastest), with our groups: no decay on norms and biases."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=OPTIMIZER.lr,
        betas=(OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2),
        eps=OPTIMIZER.adam_eps,
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
    )
