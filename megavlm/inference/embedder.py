"""`Embedder`: a Transformers model that turns texts and images into vectors, as it was trained to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.checkpoint.hf.embedding_files import read_embedding_file
from megavlm.checkpoint.hf.pretrained import Pretrained, with_pretrained_model
from megavlm.checkpoint.hf.reference import transformers_model
from megavlm.config.resolve import resolve
from megavlm.config.schema import CheckpointConfig, Config, DataConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.files import FilesSource
from megavlm.data.types import Sample, Turn
from megavlm.families.shared.family import ALL_PARTS


@dataclass(frozen=True)
class Embedder:
    """A model on its device, and what makes its inputs."""

    model: Any
    source: FilesSource
    config: Config
    pretrained: Pretrained

    @classmethod
    def load(cls, folder: Path, data: DataConfig, *, device: torch.device, dtype: torch.dtype | str) -> Embedder:
        """Return the model of an export. Raises UserError for a folder that cannot be used."""
        options = read_embedding_file(folder)
        given = Config(checkpoint=CheckpointConfig(init_from=str(folder)), data=data)
        given = replace(given, model=replace(given.model, objective=options))
        config = resolve(with_pretrained_model(given))
        source = FilesSource(config)
        model = transformers_model(folder, dtype=dtype).to(device)
        return cls(model, source, config, Pretrained.of(folder, *ALL_PARTS))

    def sample(self, text: Turn) -> Sample:
        """Return a query or a document, as its role says, with its images. Raises BadSample."""
        return self.source.embedded(text)

    @torch.inference_mode()
    def vectors(self, samples: Sequence[Sample], *, width: int | None = None) -> Tensor:
        """Return a vector of length 1 for each sample, [samples, width] fp32; `width` is by default all channels."""
        longest = max(map(len, samples))
        spec = CollateSpec.of(self.config, self.source, seq_length=longest)
        batch = collate([[sample] for sample in samples], spec)
        assert self.pretrained.family.inputs is not None
        lengths = torch.tensor([len(sample) for sample in samples])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        given = {**self.pretrained.family.inputs(batch, self.config.model), "attention_mask": mask}
        dtype, device = self.model.dtype, self.model.device
        inputs = {name: each.to(device, dtype if each.is_floating_point() else None) for name, each in given.items()}
        states = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        assert batch.text.pool is not None
        assert batch.text.pool_weights is not None
        positions, owners = batch.text.pool.to(device)
        rows = states.flatten(0, 1)[positions].float() * batch.text.pool_weights.to(device)[:, None]
        pooled = rows.new_zeros(len(samples), rows.shape[1]).index_add_(0, owners, rows)
        return F.normalize(pooled[:, :width], dim=-1).cpu()
