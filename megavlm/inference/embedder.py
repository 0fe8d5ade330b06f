"""`Embedder`: a model that turns texts and images into vectors, as it was trained to.

The model is Transformers' where Transformers has a class for it, and megavlm's own for an export in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.checkpoint.hf.embedding_files import is_in_parts, read_embedding_file
from megavlm.checkpoint.hf.pretrained import Pretrained, pretrained_of, with_pretrained_model
from megavlm.checkpoint.hf.reference import transformers_model
from megavlm.checkpoint.hf.safetensors_writer import DTYPES
from megavlm.config.resolve import resolve
from megavlm.config.schema import CheckpointConfig, Config, DataConfig, PrecisionConfig
from megavlm.data.batch import MicroBatch
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.files import FilesSource
from megavlm.data.types import Sample, Turn
from megavlm.errors import UserError
from megavlm.families.shared.family import ALL_PARTS

Pooled = Callable[[MicroBatch, Sequence[int]], Tensor]  # a batch of texts of these lengths → [texts, H] fp32
_PRECISIONS: dict[torch.dtype, Literal["fp32", "bf16", "fp16"]] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


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
        found = CheckpointConfig(init_from=str(folder))
        if in_parts:
            vision, projector, language = (str(folder / part) for part in ALL_PARTS)
            found = CheckpointConfig(vision_from=vision, projector_from=projector, language_from=language)
        given = with_pretrained_model(Config(model=said, checkpoint=found, data=data))
        config = resolve(replace(given, precision=_precision(given, dtype)) if in_parts else given)
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
    """Return megavlm's model of the folders that a configuration names. Raises UserError for another device than that
    which megavlm computes on.
    """
    from megavlm import backend

    chosen = backend.activate()
    if device.type != chosen.device.type:
        raise UserError(
            f"--device {device}: an export in parts is run by megavlm itself, which takes {chosen.device} here: leave "
            "--device out, or hide GPUs (CUDA_VISIBLE_DEVICES=)"
        )

    from megavlm.checkpoint.hf.load import load_weights
    from megavlm.train.single_process import full_model, single_process_groups

    chunk = full_model(config, single_process_groups(chosen), chosen)
    load_weights([chunk], pretrained_of(config), config, vocab_size=config.model.language.vocab_size)
    chunk.to(chosen.device).eval()

    def pooled(batch: MicroBatch, lengths: Sequence[int]) -> Tensor:
        output: Tensor = chunk(batch.to(chosen.device))
        width = config.model.language.hidden_size
        return output[: len(lengths) * width].unflatten(0, (-1, width))  # scalars of the loss are behind

    return pooled


def _precision(config: Config, dtype: torch.dtype | str) -> PrecisionConfig:
    """Return the precision of a model with weights of this type; "auto" is that of the language model's files."""
    if isinstance(dtype, str):
        (folder,) = (each.folder for each in pretrained_of(config) if "language" in each.parts)
        types = {DTYPES[info.dtype] for info in folder.tensors.values()} & _PRECISIONS.keys()
        dtype = types.pop() if len(types) == 1 else torch.float32
    return PrecisionConfig(_PRECISIONS[dtype])
