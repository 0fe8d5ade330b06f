"""`Embedder`: a model that turns texts and images into vectors, as it was trained to.

The model is Transformers' where Transformers has a class for it, and megavlm's own for an export in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.checkpoint.hf.embedding_files import is_in_parts, read_embedding_file
from megavlm.checkpoint.hf.files import transformers_model
from megavlm.checkpoint.hf.pretrained import Pretrained, with_pretrained_model
from megavlm.config.schema import CheckpointConfig, Config, DataConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.files import FilesSource
from megavlm.data.types import Sample, Turn
from megavlm.families.shared.family import ALL_PARTS
from megavlm.inputs.batch import MicroBatch
from megavlm.programs.inference.own_model import config_of_parts, own_model
from megavlm.rules.defaults import resolve

Pooled = Callable[[MicroBatch, Sequence[int]], Tensor]  # a batch of texts of these lengths → [texts, H] fp32


@dataclass(frozen=True)
class Embedder:
    """A model on its device, and what makes its inputs."""

    pooled: Pooled
    source: FilesSource
    config: Config

    @classmethod
    def load(cls, folder: Path, data: DataConfig, *, device: torch.device, dtype: torch.dtype | str) -> Embedder:
        """Return the model of an export. Raises UserError for a folder that cannot be used."""
        said, in_parts = read_embedding_file(folder), is_in_parts(folder)
        config = (
            config_of_parts(folder, data, said, dtype)
            if in_parts
            else resolve(
                with_pretrained_model(Config(model=said, checkpoint=CheckpointConfig(init_from=str(folder)), data=data))
            )
        )
        pooled = _megavlms(config, device) if in_parts else _transformers(folder, config, device, dtype)
        return cls(pooled, FilesSource(config), config)

    def sample(self, text: Turn) -> Sample:
        """Return a query or a document, as its role says, with its images. Raises BadSample."""
        return self.source.embedded(text)

    @torch.inference_mode()
    def vectors(self, samples: Sequence[Sample], *, width: int | None = None) -> Tensor:
        """Return a vector of length 1 for each sample, [samples, width] fp32; `width` is by default all channels."""
        lengths = [len(sample) for sample in samples]
        spec = CollateSpec.of(self.config, self.source, seq_length=max(lengths))
        pooled = self.pooled(collate([[sample] for sample in samples], spec), lengths)
        return F.normalize(pooled[:, :width], dim=-1).cpu()


def _transformers(folder: Path, config: Config, device: torch.device, dtype: torch.dtype | str) -> Pooled:
    """Return Transformers' model of a folder, and pooling as in training."""
    family = Pretrained.of(folder, *ALL_PARTS).family
    assert family.inputs is not None
    model, inputs_of = transformers_model(folder, dtype=dtype).to(device), family.inputs

    def pooled(batch: MicroBatch, lengths: Sequence[int]) -> Tensor:
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        given = {**inputs_of(batch, config.model), "attention_mask": mask}
        inputs = {
            name: each.to(device, model.dtype if each.is_floating_point() else None) for name, each in given.items()
        }
        states = model.base_model(**inputs, use_cache=False).last_hidden_state
        assert batch.text.pool is not None
        assert batch.text.pool_weights is not None
        positions, owners = batch.text.pool.to(device)
        rows = states.flatten(0, 1)[positions].float() * batch.text.pool_weights.to(device)[:, None]
        return rows.new_zeros(len(lengths), rows.shape[1]).index_add_(0, owners, rows)

    return pooled


def _megavlms(config: Config, device: torch.device) -> Pooled:
    """Return megavlm's model of the folders that a configuration names. Raises UserError as `own_model` does."""
    chunk, on = own_model(config, device)

    def pooled(batch: MicroBatch, lengths: Sequence[int]) -> Tensor:
        output: Tensor = chunk(batch.to(on))
        width = config.model.language.hidden_size
        return output[: len(lengths) * width].unflatten(0, (-1, width))  # scalars of the loss are behind

    return pooled
