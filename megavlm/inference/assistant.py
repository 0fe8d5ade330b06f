"""`Assistant` generates answers with a trained model, in its training format; `Talk` keeps a conversation with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megavlm.checkpoint.hf.embedding_files import check_predicts
from megavlm.config.schema import DataConfig, ModelConfig
from megavlm.data.decode import size_of
from megavlm.data.file_source import FilesSource
from megavlm.data.records.media import video_below
from megavlm.data.types import Conversation, ImageRef, Sample, SoundRef, Turn, Visual
from megavlm.errors import UserError
from megavlm.inference.model import TrainedModel
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.sounds import FRAME_RATE
from megavlm.json_files import check, listed, number, read_json, whole

_TOKEN = whole(0, 2**31 - 1)
_GENERATION = {"eos_token_id": _TOKEN | listed(_TOKEN, 0, 2**16), "top_k": _TOKEN, "top_p": number(0, 1)}
_TOP_K = 50  # of Transformers' `generate`, where a folder says none
_INCOMPLETE = "\ufffd"  # the tokenizer's text for an incomplete character


@dataclass(frozen=True)
class Sampling:
    """Options of generation; with `temperature` 0 each token is the most likely one."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0


class Streamer:
    """Receives tokens from `generate` (Transformers' streamer protocol) and shows the text that each token adds.

    The whole answer is decoded each time, because spaces and characters may depend on neighbouring tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], show: Callable[[str], None]) -> None:
        self.text = ""
        self._decode, self._show = decode, show
        self._ids: list[int] = []
        self._at_prompt = True

    def put(self, value: Tensor) -> None:
        """Take the prompt in the first call, which is not shown, and one new token in each further call."""
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


@dataclass(frozen=True)
class Assistant:
    """A model that answers prompts. `generation` is the GenerationConfig of its folder: end tokens, top-k, top-p."""

    model: TrainedModel
    generation: Any
    ends: tuple[int, ...]  # tokens that end an answer: those of the folder, of the tokenizer, and of the chat template

    @classmethod
    def load(cls, folder: Path, data: DataConfig, *, device: torch.device, dtype: str = "auto") -> Assistant:
        """Load the model of a Hugging Face folder. Raises UserError for a folder that cannot be used."""
        check_predicts(folder)
        model = TrainedModel.of(folder, data, device=device, dtype=dtype, said=ModelConfig())
        check_generation(folder / "language" if model.is_own else folder)
        if model.source.chat.template is None:
            raise UserError(f"{folder} has no chat template: name one with --chat-template, for example vicuna")
        generation = _generation(folder / "language") if model.is_own else model.module.generation_config
        own = generation.eos_token_id
        listed = own if isinstance(own, list) else [] if own is None else [own]
        return cls(model, generation, tuple(sorted({*listed, *model.source.answer_ends})))

    @property
    def source(self) -> FilesSource:
        """Return the source that encodes prompts with the model's chat template and tokenizer."""
        return self.model.source

    def answers(self, samples: Sequence[Sample], sampling: Sampling) -> list[str]:
        """Return the answer to each prompt of a batch (`FilesSource.prompt`), without thoughts before it.

        Near the model's last position each prompt is answered alone, as the longest would leave others too little room.
        """
        if len(samples) > 1 and self._room(samples) < sampling.max_new_tokens:
            return [answer for sample in samples for answer in self.answers([sample], sampling)]
        return [self._answer(ids) for ids in self._generate(samples, sampling)]

    def stream(self, sample: Sample, sampling: Sampling, show: Callable[[str], None]) -> str:
        """Generate the answer to one prompt, show each piece of text as soon as it is final, and return the answer
        without thoughts.
        """
        (ids,) = self._generate([sample], sampling, Streamer(self.text, show))
        return self._answer(ids)

    def text(self, ids: Sequence[int]) -> str:
        """Decode generated tokens up to the first end token, without special tokens."""
        return self.source.decode_answer(self._until_end(ids))

    def _answer(self, ids: Sequence[int]) -> str:
        """Decode generated tokens as `text` does, without thoughts before the answer."""
        made, ends = self._until_end(ids), self.source.chat.thought_ends
        start = max((place + 1 for place, token in enumerate(made) if token in ends), default=0)
        return self.source.decode_answer(made[start:])

    def _until_end(self, ids: Sequence[int]) -> Sequence[int]:
        end = next((place for place, token in enumerate(ids) if token in self.ends), len(ids))
        return ids[:end]

    def check_length(self, sample: Sample) -> None:
        """Raise BadSample for a prompt that leaves no room for an answer within the model's positions."""
        if self._room([sample]) < 1:
            longest = self.model.config.model.language.max_positions
            raise BadSample(Reason.TOO_LONG, f"the prompt has {len(sample)} tokens and the model {longest} positions")

    def _room(self, samples: Sequence[Sample]) -> float:
        """Return how many tokens fit after the longest prompt of a batch; infinity if positions are not limited."""
        longest = self.model.config.model.language.max_positions
        return math.inf if longest is None else longest - max(map(len, samples))

    @torch.inference_mode()
    def _generate(
        self, samples: Sequence[Sample], sampling: Sampling, streamer: Streamer | None = None
    ) -> list[list[int]]:
        torch.manual_seed(sampling.seed)
        most = int(min(sampling.max_new_tokens, self._room(samples)))
        if self.model.is_own:
            return self._own_answers(samples, most, sampling.temperature, streamer)
        from transformers import GenerationConfig

        sampled = sampling.temperature > 0
        options = GenerationConfig(
            max_new_tokens=most,
            do_sample=sampled,
            temperature=sampling.temperature if sampled else None,
            repetition_penalty=1.0,
            eos_token_id=list(self.ends),
            pad_token_id=self.source.pad_token,
            suppress_tokens=list(self.source.feature_tokens),  # generated image tokens would have no features
        )
        inputs = self.inputs(samples)
        made = self.model.module.generate(**inputs, generation_config=options, streamer=streamer)
        width = inputs["input_ids"].shape[1]
        return made[:, width:].tolist()

    def inputs(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return the arguments of the model for a batch of prompts, padded on the left."""
        batch, width = self.model.batch(samples), max(map(len, samples))
        shifts = torch.tensor([width - len(sample) for sample in samples])[:, None]
        places = (torch.arange(width) - shifts) % width  # [B, S]: position of each token before the shift
        tokens, positions = (
            each.expand(*each.shape[:-2], *places.shape).gather(-1, places.expand(*each.shape[:-2], *places.shape))
            for each in (batch.text.tokens, batch.text.positions)
        )
        prefixes = tuple(
            (first + shift, count)
            for (first, count), shift in zip(batch.text.prefixes, shifts[:, 0].tolist(), strict=True)
        )
        text = replace(batch.text, tokens=tokens, positions=positions, prefixes=prefixes)
        shifted = replace(batch, text=text)
        return self.model.inputs(shifted, (torch.arange(width) >= shifts).long())

    def _own_answers(
        self, samples: Sequence[Sample], most: int, temperature: float, streamer: Streamer | None
    ) -> list[list[int]]:
        """Generate up to `most` tokens after each prompt with megavlm's own model and a key/value cache."""
        from megavlm.train.generate import following_tokens

        made: list[list[int]] = []
        if streamer is not None:
            streamer.put(torch.empty(0))
        tokens = following_tokens(
            lambda batch: self.model.module(batch.to(self.model.device), logits=True),
            self.model.spec(samples),
            samples,
            room=most,
            device=self.model.device,
            choose=lambda scores: self._chosen(scores.float(), temperature),
        )
        for _, chosen in zip(range(most), tokens, strict=False):
            made.append(chosen.tolist())
            if streamer is not None:
                streamer.put(chosen)
            if all(not set(self.ends).isdisjoint(answer) for answer in zip(*made, strict=True)):
                break
        if streamer is not None:
            streamer.end()
        return [list(answer) for answer in zip(*made, strict=True)]

    def _chosen(self, scores: Tensor, temperature: float) -> Tensor:
        """Choose a token per row of logits [B, vocabulary]: the most likely, or at temperature > 0 a sampled one."""
        if not temperature:
            return scores.argmax(-1)
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        top_k, top_p = self.generation.top_k, self.generation.top_p
        top_k = _TOP_K if top_k is None else top_k
        none: Any = None
        for warp in (
            TemperatureLogitsWarper(temperature),
            *([TopKLogitsWarper(top_k)] if top_k else []),
            *([TopPLogitsWarper(top_p)] if top_p and top_p < 1 else []),
        ):
            scores = warp(none, scores)
        return torch.multinomial(scores.softmax(-1), 1)[:, 0]


class Talk:
    """A conversation with an assistant. Each answer is generated from all turns, with all that they show."""

    def __init__(self, assistant: Assistant, sampling: Sampling, *, system: str | None = None) -> None:
        self._assistant = assistant
        self._sampling = sampling
        self._opening = (Turn("system", (system,)),) if system else ()
        self.reset()

    def reset(self) -> None:
        """Forget all turns and what they show; the system turn stays."""
        self._turns: tuple[Turn, ...] = self._opening
        self._images: list[Visual] = []

    def add(self, path: str, *, kind: str = "image") -> str:
        """Add an image, a video (a clip or a folder of frames) or a sound ("audio") to the next message.

        Returns its size in words. Raises BadSample for a file of another kind, and for a kind that the model does not
        read.
        """
        video = kind == "video"
        file = Path(path).expanduser().resolve()
        if not (file.exists() if video else file.is_file()):
            what = "is an address: download it first" if "://" in path else f"is not a file{' or folder' * video}"
            raise BadSample(Reason.MISSING, f"{path} {what}")
        visual: Visual = SoundRef(file) if kind == "audio" else ImageRef(file)
        visual = video_below(file.parent, file.name) if video else visual
        try:
            if isinstance(visual, ImageRef):
                words = "{}×{} pixels".format(*size_of(file))
            else:
                (layout,) = self._assistant.source.visuals.layouts([visual])
                film, seconds = layout.film, layout.frames / FRAME_RATE
                words = f"{len(film.frames)} frames, to {film.seconds[-1]:.1f} s" if film else f"{seconds:.1f} s"
        except BadSample as error:
            raise BadSample(error.reason, f"{path}: {error.detail}") from error
        self._images.append(visual)
        return words

    def answer(self, message: str, show: Callable[[str], None]) -> str:
        """Generate the answer to a message, show it piece by piece, and return it.

        Raises BadSample for a message that cannot be encoded; the conversation is then unchanged. An answer that Ctrl-C
        stops (KeyboardInterrupt) is not kept either.
        """
        question = Turn("user", (*self._images, message))
        turns = (*self._turns, question)
        sample = self._assistant.source.prompt(Conversation(turns))
        self._assistant.check_length(sample)
        text = self._assistant.stream(sample, self._sampling, show)
        self._turns, self._images = (*turns, Turn("assistant", (text,))), []
        return text


def _generation(folder: Path) -> Any:
    """Return the GenerationConfig of a folder; the default GenerationConfig if the folder has none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return GenerationConfig()


def check_generation(folder: Path) -> None:
    """Raise UserError for a generation_config.json with wrong values of eos_token_id, top_k or top_p."""
    if (file := folder / "generation_config.json").exists():
        check(read_json(file), _GENERATION, str(file))
