"""`Embedder` computes the vectors of queries and documents, with their images and videos."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.checkpoint.hf.embedding_files import read_embedding_file
from megavlm.config.messages import shown
from megavlm.config.schema import DataConfig
from megavlm.data.records.opening import RawRecords
from megavlm.data.records.turns import text_turn
from megavlm.data.types import Role, Sample
from megavlm.errors import UserError
from megavlm.inference.model import TrainedModel
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.batch import MicroBatch


@dataclass(frozen=True)
class Embedder:
    """A trained embedding model."""

    model: TrainedModel

    @classmethod
    def load(cls, folder: Path, data: DataConfig, *, device: torch.device, dtype: str) -> Embedder:
        """Load the model of an exported folder. Raises UserError for a folder that cannot be used."""
        return cls(TrainedModel.of(folder, data, device=device, dtype=dtype, said=read_embedding_file(folder)))

    @property
    def channels(self) -> int:
        return self.model.config.model.language.hidden_size

    def samples(self, raw: RawRecords, role: Role) -> Iterator[tuple[Any, Sample]]:
        """Yield the id and the encoded sample of each record, as a query or as a document (`role`: positive).

        Raises UserError, which names the record, for a record that cannot be used.
        """
        for number in range(len(raw.records)):
            try:
                record = raw.records.read(number)
                if not isinstance(record, dict):
                    raise BadSample(Reason.NOT_A_RECORD, f"a record is an object with fields, not {shown(record)}")
                turn = text_turn(record, raw.find, raw.find_video)
                yield record.get("id", number + 1), self.model.source.embedded(replace(turn, role=role))
            except (BadSample, RecursionError) as error:
                reason = error.detail if isinstance(error, BadSample) else "it is nested too deeply"
                if isinstance(error, BadSample) and error.reason in (Reason.MISSING, Reason.OUTSIDE):
                    reason += ": name the folder that its images and videos are in, as FILE,image_root=DIR"
                raise UserError(f"{raw.records.label(number)}: {reason}") from error

    @torch.inference_mode()
    def vectors(self, samples: Sequence[Sample], *, width: int | None = None) -> Tensor:
        """Return a vector of length 1 for each sample, [samples, width] fp32; `width` is by default all channels."""
        batch = self.model.batch(samples)
        pooled = self._of_own_model(batch, len(samples)) if self.model.is_own else self._pooled(batch, samples)
        return F.normalize(pooled[:, :width], dim=-1).cpu()

    def _of_own_model(self, batch: MicroBatch, count: int) -> Tensor:
        output: Tensor = self.model.module(batch.to(self.model.device))
        return output[: count * self.channels].unflatten(0, (-1, self.channels))  # scalars of the loss follow

    def _pooled(self, batch: MicroBatch, samples: Sequence[Sample]) -> Tensor:
        """Return the last hidden states of Transformers' model, pooled as in training: [samples, channels] fp32."""
        lengths = torch.tensor([len(sample) for sample in samples])[:, None]
        inputs = self.model.inputs(batch, (torch.arange(int(lengths.max())) < lengths).long())
        states = self.model.module.base_model(**inputs, use_cache=False).last_hidden_state
        assert batch.text.pool is not None
        assert batch.text.pool_weights is not None
        positions, owners = batch.text.pool.to(self.model.device)
        rows = states.flatten(0, 1)[positions].float() * batch.text.pool_weights.to(self.model.device)[:, None]
        return rows.new_zeros(len(samples), rows.shape[1]).index_add_(0, owners, rows)
