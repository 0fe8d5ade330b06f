"""A reference of multi-token prediction on models of Transformers, which has no such layers for these families.

The layer itself is a decoder layer of the model's own class. What surrounds it is written here, from DeepSeek-V3
(section 2.2): rows of one sample each, shifted by slices.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megavlm.checkpoint.hf.hf_files import HfFolder
from megavlm.config.schema import Config
from megavlm.families import family_of
from megavlm.inputs.batch import MicroBatch

QWEN = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc"}
QWEN |= {"layer": "mtp.layers.0", "norm": "mtp.norm"}


def _glm(layers: int) -> dict[str, str]:
    layer = f"model.language_model.layers.{layers}"
    return {
        **{name: f"{layer}.{name}" for name in ("enorm", "hnorm", "eh_proj")},
        "layer": layer,
        "norm": f"{layer}.shared_head.norm",
    }


class Predictor(nn.Module):
    """Depth 1: what predicts token t + 2 at position t from the last hidden state and the embedding of token t + 1."""

    def __init__(self, text: Any, layer: type[nn.Module], norm: Any) -> None:
        super().__init__()
        one = copy.deepcopy(text)
        one.layer_types, one.num_hidden_layers, one.first_k_dense_replace = ["full_attention"], 1, 0
        width, epsilon = text.hidden_size, text.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (norm(width, eps=epsilon) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = layer(one, 0)
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):  # experts begin without values
            if tensor.ndim > 1 or "bias" in name:
                nn.init.normal_(tensor, std=0.05, generator=torch.Generator().manual_seed(len(name)))

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: Any) -> Tensor:
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        found = self.layer(self.eh_proj(joined), position_embeddings=rotary, attention_mask=None)
        return self.norm(found[0] if isinstance(found, tuple) else found)


class _Saves:
    """Writes the predictor under the names of published files, with the copies that GLM's hold."""

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        super().save_pretrained(save_directory, **options)  # type: ignore[misc]
        file = Path(save_directory) / "model.safetensors"
        names = self.published  # type: ignore[attr-defined]
        save_file(published(load_file(file), names), file, metadata={"format": "pt"})


def published(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return weights with those of the predictor under their published names."""
    found = {}
    for name, tensor in weights.items():
        owner, _, rest = name.removeprefix("predictor.").partition(".")
        found[f"{names[owner]}.{rest}" if name.startswith("predictor.") else name] = tensor
    if names["layer"] != QWEN["layer"]:
        found[f"{names['layer']}.embed_tokens.weight"] = found["model.language_model.embed_tokens.weight"].clone()
        found[f"{names['layer']}.shared_head.head.weight"] = found["lm_head.weight"].clone()
    return found


def with_predictor(theirs: Any) -> Any:
    """Return the model with a layer that predicts a further token, which `save_pretrained` writes with the rest."""
    language, text = theirs.model.language_model, theirs.config.text_config
    last = language.layers[-1]
    theirs.predictor = Predictor(text, type(last), type(last.input_layernorm))
    glm = theirs.config.model_type.startswith("glm")
    theirs.published = _glm(text.num_hidden_layers) if glm else QWEN
    theirs.__class__ = type("WithPredictor", (_Saves, type(theirs)), {})
    return theirs


def losses_of(theirs: Any, folder: Path, batch: MicroBatch, config: Config) -> tuple[Tensor, Tensor]:
    """Return the sums, over trained tokens, of the cross entropies of the next token and of the one after it."""
    seen: dict[str, Tensor] = {}
    language = theirs.model.language_model

    def before(module: Any, args: Any, kwargs: Any) -> None:
        seen["embedded"] = kwargs["inputs_embeds"]

    def after(module: Any, args: Any, output: Any) -> None:
        seen["hidden"] = output.last_hidden_state

    hooks = language.register_forward_pre_hook(before, with_kwargs=True), language.register_forward_hook(after)
    inputs = family_of(HfFolder(folder).settings).inputs
    assert inputs is not None
    logits = theirs(**inputs(batch, config.model), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    text = batch.text
    positions = text.positions.expand(3, *text.tokens.shape)[..., 1:]
    later = seen["embedded"][:, 1:]
    hidden = theirs.predictor(later, seen["hidden"][:, :-1], language.rotary_emb(later, positions))
    further = theirs.lm_head(hidden)
    return _sum(logits, text.labels, text.loss_mask), _sum(further, text.labels[:, 1:], text.loss_mask[:, 1:])


def _sum(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * mask).sum()
