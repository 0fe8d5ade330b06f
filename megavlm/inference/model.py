"""`TrainedModel` is the model of a Hugging Face folder on one process, run by Transformers, or by megavlm for an
export in parts.

Samples are encoded by the code of training (`FilesSource`: chat template, tokens, patches). The results equal those of
Transformers' processors (`tests/parity/test_files_hf.py`), and need neither these processors nor torchvision.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megavlm.checkpoint.hf.embedding_files import begun_with, is_in_parts
from megavlm.checkpoint.hf.hf_files import DTYPES, transformers_model
from megavlm.checkpoint.hf.pretrained import Pretrained, pretrained_of, with_pretrained_model
from megavlm.config.schema import Config, DataConfig, ModelConfig, PrecisionConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.file_source import FilesSource
from megavlm.data.types import Sample
from megavlm.errors import UserError
from megavlm.families.shared.family import ALL_PARTS
from megavlm.inputs.batch import MicroBatch
from megavlm.rules.defaults import resolve

_PRECISIONS: dict[torch.dtype, Literal["fp32", "bf16", "fp16"]] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
TYPES = ("auto", *(str(dtype).removeprefix("torch.") for dtype in _PRECISIONS))  # auto: the types of the files


@dataclass(frozen=True)
class TrainedModel:
    """The model of a folder, loaded at first use, and the source that encodes its samples."""

    folder: Path
    config: Config
    source: FilesSource
    pretrained: Pretrained | None  # None for an export in parts, which megavlm runs
    asked: torch.device
    dtype: str  # of TYPES

    @classmethod
    def of(
        cls, folder: Path, data: DataConfig, *, device: torch.device, dtype: str = "auto", said: ModelConfig
    ) -> TrainedModel:
        """Open the model of a folder; its weights are read at first use.

        `said` has model options that the folder's own configuration lacks. Raises UserError for a folder that cannot be
        used.
        """
        given = with_pretrained_model(replace(begun_with(folder, said), data=data))
        if is_in_parts(folder):
            config = resolve(replace(given, precision=PrecisionConfig(_precision_of(given, dtype))))
            return cls(folder, config, _source_of(config), None, device, dtype)
        config, pretrained = resolve(given), Pretrained.of(folder, *ALL_PARTS)
        if problems := pretrained.problems():
            raise UserError(f"{folder} does not contain the model that its config.json describes: {problems[0]}")
        return cls(folder, config, _source_of(config), pretrained, device, dtype)

    @property
    def is_own(self) -> bool:
        return self.pretrained is None

    @cached_property
    def module(self) -> Any:
        """Load the model in evaluation mode on its device. Raises UserError for a device on which it cannot run."""
        if self.is_own:
            return _own_module(self.config, self.asked)
        dtype = "auto" if self.dtype == "auto" else getattr(torch, self.dtype)
        return transformers_model(self.folder, dtype=dtype).to(self.asked)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def spec(self, samples: Sequence[Sample]) -> CollateSpec:
        return CollateSpec.of(self.config, self.source, seq_length=max(map(len, samples)))

    def batch(self, samples: Sequence[Sample]) -> MicroBatch:
        """Return a micro-batch of the samples, each in a row of its own."""
        return collate([[sample] for sample in samples], self.spec(samples))

    def inputs(self, batch: MicroBatch, mask: Tensor) -> dict[str, Tensor]:
        """Return the arguments of Transformers' model for a micro-batch, with an attention mask [B, S]."""
        assert self.pretrained is not None
        assert self.pretrained.family.inputs is not None
        given = {**self.pretrained.family.inputs(batch, self.config.model), "attention_mask": mask}
        dtype = self.module.dtype
        return {name: each.to(self.device, dtype if each.is_floating_point() else None) for name, each in given.items()}


def _source_of(config: Config) -> FilesSource:
    try:
        return FilesSource(config)
    except UserError as error:  # it may propose options that a run has, and these commands do not
        said = re.sub(r", or name a folder[^,]* with --(tokenizer|image-processor)$", "", str(error))
        raise UserError(said) from error


def _precision_of(config: Config, dtype: str) -> Literal["fp32", "bf16", "fp16"]:
    """Return the precision in which megavlm runs an export in parts: `dtype`, or that of the language model's files."""
    if dtype != "auto":
        return _PRECISIONS[getattr(torch, dtype)]
    (words,) = (each.folder for each in pretrained_of(config) if "language" in each.parts)
    types = {DTYPES[info.dtype] for info in words.tensors.values()} & _PRECISIONS.keys()
    return _PRECISIONS[types.pop()] if len(types) == 1 else "fp32"


def _own_module(config: Config, device: torch.device) -> Any:
    """Load an export in parts into megavlm's own model. Raises UserError for a device other than the backend's."""
    from megavlm import backend

    chosen = backend.activate()
    if device.type != chosen.device.type:
        raise UserError(
            f"--device {device}: an export in parts is run by megavlm itself, which takes {chosen.device} here: leave "
            "--device out, or hide GPUs (CUDA_VISIBLE_DEVICES=)"
        )

    from megavlm.checkpoint.hf.importing import load_weights
    from megavlm.inference.single_process import full_model, single_process_groups

    chunk = full_model(config, single_process_groups(chosen), chosen)
    load_weights([chunk], pretrained_of(config), config, vocab_size=config.model.language.vocab_size)
    return chunk.to(chosen.device).eval()
