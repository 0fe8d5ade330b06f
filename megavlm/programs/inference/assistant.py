"""`Assistant`: a model that answers conversations, in the format that it was trained in: Transformers' where it has a
class for it, and megavlm's own for an export in parts.

Chat template, tokens and patches are those of training (`FilesSource`), which equal those of Transformers' processors
(`tests/parity/test_files_hf.py`) and need neither their code nor torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megavlm.checkpoint.hf.embedding_files import is_in_parts
from megavlm.checkpoint.hf.hf_files import transformers_model
from megavlm.checkpoint.hf.pretrained import Pretrained
from megavlm.config.schema import Config, DataConfig, ModelConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.file_source import FilesSource
from megavlm.data.types import Sample
from megavlm.errors import UserError
from megavlm.families.shared.family import ALL_PARTS
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.json_files import check, listed, number, read_json, whole
from megavlm.programs.inference.own_model import OwnAnswers, Streamer, config_of

_TOKEN = whole(0, 2**31 - 1)
_GENERATION = {"eos_token_id": _TOKEN | listed(_TOKEN, 0, 2**16), "top_k": _TOKEN, "top_p": number(0, 1)}
DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Sampling:
    """How answers are generated; with `temperature` 0 each token is the most likely one."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Assistant:
    """A model on its device, and what makes its inputs."""

    model: Any
    source: FilesSource
    config: Config
    pretrained: Pretrained | None  # None where the model is megavlm's own (`OwnAnswers`)
    ends: tuple[int, ...]  # tokens that end an answer

    @classmethod
    def load(cls, folder: Path, data: DataConfig, *, device: torch.device, dtype: str = "auto") -> Assistant:
        """Return the model of a Hugging Face folder. Raises UserError for a folder that cannot be used."""
        in_parts = is_in_parts(folder)
        check_generation(folder / "language" if in_parts else folder)
        config = config_of(folder, data, ModelConfig(), DTYPES[dtype])
        pretrained = None if in_parts else Pretrained.of(folder, *ALL_PARTS)
        if pretrained is not None and (problems := pretrained.problems()):
            raise UserError(f"{folder} does not contain the model that its config.json describes: {problems[0]}")
        source = _source(folder, config)
        model = (
            OwnAnswers.load(folder, config, device)
            if in_parts
            else transformers_model(folder, dtype=DTYPES[dtype]).to(device)
        )
        return cls(model, source, config, pretrained, _ends(model, source))

    def answers(self, samples: Sequence[Sample], sampling: Sampling) -> list[str]:
        """Return the answer to each prompt of a batch (`FilesSource.prompt`)."""
        return [self.text(ids) for ids in self._generate(samples, sampling)]

    def stream(self, sample: Sample, sampling: Sampling, show: Callable[[str], None]) -> str:
        """Return the answer to one prompt, and show each piece of it as soon as it is certain."""
        streamer = Streamer(self.text, show)
        self._generate([sample], sampling, streamer)
        return streamer.text

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of generated tokens, up to the first that ends an answer, without special tokens."""
        end = next((place for place, token in enumerate(ids) if token in self.ends), len(ids))
        return self.source.decode_answer(ids[:end])

    def check_length(self, sample: Sample) -> None:
        """Raise BadSample for a prompt that leaves no room for an answer within the model's positions."""
        if self._room([sample]) < 1:
            longest = self.config.model.language.max_positions
            raise BadSample(Reason.TOO_LONG, f"the prompt has {len(sample)} tokens and the model {longest} positions")

    def _room(self, samples: Sequence[Sample]) -> float:
        """Return how many tokens fit after the longest of some prompts."""
        longest = self.config.model.language.max_positions
        return math.inf if longest is None else longest - max(map(len, samples))

    @torch.inference_mode()
    def _generate(
        self, samples: Sequence[Sample], sampling: Sampling, streamer: Streamer | None = None
    ) -> list[list[int]]:
        from transformers import GenerationConfig

        torch.manual_seed(sampling.seed)
        most = int(min(sampling.max_new_tokens, self._room(samples)))
        if isinstance(self.model, OwnAnswers):
            spec = CollateSpec.of(self.config, self.source, seq_length=max(map(len, samples)))
            return self.model.generate(
                samples, spec, most=most, ends=self.ends, temperature=sampling.temperature, streamer=streamer
            )
        sampled = sampling.temperature > 0
        options = GenerationConfig(
            max_new_tokens=most,
            do_sample=sampled,
            temperature=sampling.temperature if sampled else None,
            repetition_penalty=1.0,
            eos_token_id=list(self.ends),
            pad_token_id=self.source.pad_token,
            suppress_tokens=list(self.source.feature_tokens),  # there would be no features for them
        )
        inputs = self.inputs(samples)
        made = self.model.generate(**inputs, generation_config=options, streamer=streamer)
        width = inputs["input_ids"].shape[1]
        answers: list[list[int]] = made[:, width:].tolist()
        return answers

    def inputs(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return the arguments of the model for a batch of prompts, padded on the left: answers follow on the right."""
        width = max(map(len, samples))
        batch = collate([[sample] for sample in samples], CollateSpec.of(self.config, self.source, seq_length=width))
        shifts = [width - len(sample) for sample in samples]
        places = (torch.arange(width) - torch.tensor(shifts)[:, None]) % width  # [B, S]: where each came from
        tokens, positions = (
            each.expand(*each.shape[:-2], *places.shape).gather(-1, places.expand(*each.shape[:-2], *places.shape))
            for each in (batch.text.tokens, batch.text.positions)
        )
        mask = (torch.arange(width) >= torch.tensor(shifts)[:, None]).long()
        batch = replace(batch, text=replace(batch.text, tokens=tokens, positions=positions))
        assert self.pretrained is not None
        assert self.pretrained.family.inputs is not None
        given = {**self.pretrained.family.inputs(batch, self.config.model), "attention_mask": mask}
        dtype, device = self.model.dtype, self.model.device
        return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in given.items()}


def check_generation(folder: Path) -> None:
    """Raise UserError for a generation_config.json whose values are not what answers are generated with."""
    if (file := folder / "generation_config.json").exists():
        check(read_json(file), _GENERATION, str(file))


def _source(folder: Path, config: Config) -> FilesSource:
    """Return what makes prompts. Raises UserError for a folder without a chat template."""
    source = FilesSource(config)
    if source.chat.template is None:
        raise UserError(f"{folder} has no chat template: name one with --chat-template, for example vicuna")
    return source


def _ends(model: Any, source: FilesSource) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of the folder, of the tokenizer, and of the chat template."""
    own = model.generation_config.eos_token_id
    listed = own if isinstance(own, list) else [] if own is None else [own]
    return tuple(sorted({*listed, *source.answer_ends}))
