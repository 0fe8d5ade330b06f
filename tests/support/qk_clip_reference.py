"""QK-Clip as its paper writes it, on whole matrices of logits, to compare a run's steps with.

Rows are one sample each, and images have no windows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megavlm.arch.layers import is_merged

Logits = dict[str, list[float]]  # of a layer, the largest of each head since they were last read


def watched_logits(run: Any) -> Logits:
    """The largest logits of each layer, which passes of the run from now on add to."""
    seen: Logits = {}
    batches: list[Any] = []
    chunk = run.engine.chunks[0].module
    chunk.register_forward_pre_hook(lambda module, arguments: batches.append(arguments[0]))
    for name, layer in chunk.transformer_layers:

        def look(module: Any, arguments: Any, name: str = name) -> None:
            found = seen.setdefault(name, [])
            for query, key in _sequences(name, batches[-1], arguments[0], arguments[1], run.config.model):
                for head in range(query.shape[1]):
                    logits = query[:, head] @ key[:, head * key.shape[1] // query.shape[1]].T
                    if name.startswith("language"):
                        logits = logits[torch.ones_like(logits, dtype=torch.bool).tril()]
                    found += [0.0] * (head + 1 - len(found))
                    found[head] = max(found[head], float(logits.max()) / math.sqrt(query.shape[-1]))

        layer.self_attention.core_attention.register_forward_pre_hook(look)
    return seen


def _sequences(name: str, batch: Any, query: Tensor, key: Tensor, model: Any) -> list[tuple[Tensor, Tensor]]:
    """Queries and keys [length, heads, width] of each sample, or of each image, without padding."""
    if name.startswith("language"):
        return [(query[:length, row], key[:length, row]) for row, length in enumerate(batch.text.lengths)]
    share = 4 if is_merged(name, model.vision) else 1
    lengths = [model.vision.class_token + rows * columns // share for rows, columns in batch.image_sizes.grids]
    total = sum(lengths)
    return list(zip(query[:total, 0].split(lengths), key[:total, 0].split(lengths), strict=True)) if lengths else []


def clip(weights: dict[str, Tensor], seen: Logits, config: Any) -> None:
    """Scale the rows of each head by hand, and forget the logits; some heads of each part must be above the threshold,
    and some head must not.
    """
    language, vision, options = config.model.language, config.model.vision, config.optimizer
    counts = {"language": [0, 0], "vision": [0, 0]}
    for layer, largest in seen.items():
        part = layer.partition(".")[0]
        heads, groups = (language.num_attention_heads, language.num_query_groups)
        if part == "vision":
            heads = groups = vision.num_attention_heads
        each = heads // groups
        for group in range(groups):
            shrink = [min(1.0, options.qk_clip_threshold / max(m, 1e-300)) for m in largest[group * each :][:each]]
            for gamma in shrink:
                counts[part][gamma < 1] += 1
            # One head alone: both by the square root. Else the key by that of the head that needs least.
            key = max(shrink) ** 0.5
            for kind in ("weight", "bias"):
                rows = weights.get(f"{layer}.self_attention.linear_qkv.{kind}")
                if rows is not None:
                    of_group = rows.view(groups, each + 2, -1)[group]
                    for head, gamma in enumerate(shrink):
                        of_group[head] *= gamma / key
                    of_group[each] *= key
        seen[layer] = []
    assert all(clipped for _, clipped in counts.values()), counts
    assert any(left for left, _ in counts.values()), counts
