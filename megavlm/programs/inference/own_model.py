"""megavlm's own model of an export in parts, which Transformers has no class for: on one process, and as it answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megavlm.checkpoint.hf.embedding_files import is_in_parts, read_file_of_parts
from megavlm.checkpoint.hf.hf_files import DTYPES
from megavlm.checkpoint.hf.pretrained import pretrained_of, with_pretrained_model
from megavlm.config.schema import CheckpointConfig, Config, DataConfig, ModelConfig, PrecisionConfig
from megavlm.data.collate import CollateSpec
from megavlm.data.types import Sample
from megavlm.errors import UserError
from megavlm.families.shared.family import ALL_PARTS
from megavlm.rules.defaults import resolve

_INCOMPLETE = "\ufffd"  # what a tokenizer writes for the first bytes of a character


class Streamer:
    """Receives tokens from `generate` (Transformers' streamer protocol) and shows the text that they add.

    The whole answer is decoded each time, because spaces and characters may depend on neighbouring tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], show: Callable[[str], None]) -> None:
        self.text = ""
        self._decode, self._show = decode, show
        self._ids: list[int] = []
        self._at_prompt = True

    def put(self, value: Tensor) -> None:
        """Take the prompt, which is not shown, and then one token after the other."""
        if self._at_prompt:
            self._at_prompt = False
            return
        self._ids += value.flatten().tolist()
        text = self._decode(self._ids)
        if not text.endswith(_INCOMPLETE):
            self._extend(text)

    def end(self) -> None:
        self._extend(self._decode(self._ids))

    def _extend(self, text: str) -> None:
        if text.startswith(self.text):
            self._show(text[len(self.text) :])
            self.text = text


_PRECISIONS: dict[torch.dtype, Literal["fp32", "bf16", "fp16"]] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def config_of(folder: Path, data: DataConfig, model: ModelConfig, dtype: torch.dtype | str) -> Config:
    """Return the configuration of the model that a Hugging Face folder or an export in parts holds. Raises UserError if
    it cannot be used.

    `model` says what the folders do not; weights of parts have the type `dtype`, "auto" that of the language model's
    files.
    """
    if not is_in_parts(folder):
        given = Config(model=model, checkpoint=CheckpointConfig(init_from=str(folder)), data=data)
        return resolve(with_pretrained_model(given))
    vision, projector, language = (str(folder / part) for part in ALL_PARTS)
    found = CheckpointConfig(vision_from=vision, projector_from=projector, language_from=language)
    said = read_file_of_parts(folder, model)
    given = with_pretrained_model(Config(model=said, checkpoint=found, data=data))
    return resolve(replace(given, precision=_precision(given, dtype)))


def _precision(config: Config, dtype: torch.dtype | str) -> PrecisionConfig:
    if isinstance(dtype, str):
        (folder,) = (each.folder for each in pretrained_of(config) if "language" in each.parts)
        types = {DTYPES[info.dtype] for info in folder.tensors.values()} & _PRECISIONS.keys()
        dtype = types.pop() if len(types) == 1 else torch.float32
    return PrecisionConfig(_PRECISIONS[dtype])


def own_model(config: Config, device: torch.device) -> tuple[Any, torch.device]:
    """Return megavlm's model of the folders that a configuration names, in evaluation mode, and where it lies.

    Raises UserError for another device than that which megavlm computes on.
    """
    from megavlm import backend

    chosen = backend.activate()
    if device.type != chosen.device.type:
        raise UserError(
            f"--device {device}: an export in parts is run by megavlm itself, which takes {chosen.device} here: leave "
            "--device out, or hide GPUs (CUDA_VISIBLE_DEVICES=)"
        )

    from megavlm.checkpoint.hf.importing import load_weights
    from megavlm.train.single_process import full_model, single_process_groups

    chunk = full_model(config, single_process_groups(chosen), chosen)
    load_weights([chunk], pretrained_of(config), config, vocab_size=config.model.language.vocab_size)
    return chunk.to(chosen.device).eval(), chosen.device


@dataclass(frozen=True)
class OwnAnswers:
    """Generates as Transformers' `generate` does, with megavlm's model and a key/value cache."""

    chunk: Any
    device: torch.device
    generation_config: Any  # of the language model's folder: what ends an answer, top-k and top-p

    @classmethod
    def load(cls, folder: Path, config: Config, device: torch.device) -> OwnAnswers:
        """Return the model of an export in parts. Raises UserError as `own_model` does."""
        from transformers import GenerationConfig

        try:
            found = GenerationConfig.from_pretrained(folder / "language", local_files_only=True)
        except (OSError, ValueError):
            found = GenerationConfig()
        return cls(*own_model(config, device), found)

    def generate(
        self,
        samples: Sequence[Sample],
        spec: CollateSpec,
        *,
        most: int,
        ends: Collection[int],
        temperature: float,
        streamer: Streamer | None,
    ) -> list[list[int]]:
        """Return up to `most` tokens after each prompt; with a temperature they are drawn, else the likeliest."""
        from megavlm.train.generate import following_tokens

        made: list[list[int]] = []
        if streamer is not None:
            streamer.put(torch.empty(0))
        tokens = following_tokens(
            lambda batch: self.chunk(batch.to(self.device), logits=True),
            spec,
            samples,
            room=most,
            device=self.device,
            choose=lambda scores: self._chosen(scores.float(), temperature),
        )
        for _, chosen in zip(range(most), tokens, strict=False):
            made.append(chosen.tolist())
            if streamer is not None:
                streamer.put(chosen)
            if all(not set(ends).isdisjoint(answer) for answer in zip(*made, strict=True)):
                break
        if streamer is not None:
            streamer.end()
        return [list(answer) for answer in zip(*made, strict=True)]

    def _chosen(self, scores: Tensor, temperature: float) -> Tensor:
        """Return a token for each row of scores [B, vocabulary]."""
        if not temperature:
            return scores.argmax(-1)
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        top_k, top_p = self.generation_config.top_k, self.generation_config.top_p
        none: Any = None
        for warp in (
            TemperatureLogitsWarper(temperature),
            *([TopKLogitsWarper(top_k)] if top_k else []),
            *([TopPLogitsWarper(top_p)] if top_p and top_p < 1 else []),
        ):
            scores = warp(none, scores)
        return torch.multinomial(scores.softmax(-1), 1)[:, 0]
