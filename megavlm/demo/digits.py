"""`DigitsSource`: canvases of handwritten digits with questions and answers in words, the demo's data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megavlm.arch.image_tokens import grid_of, tokens_per_grid
from megavlm.config.schema import Config
from megavlm.data.source import ComputedSource, HeldOutPrompt, generator
from megavlm.data.tokenizers.training import Tokenizer, ensure_tokenizer
from megavlm.data.types import HeldOut, Sample
from megavlm.demo.canvases import MAX_DIGITS, PHRASINGS, WORDS, Canvases, Scene
from megavlm.errors import UserError
from megavlm.inputs.patches import Image
from megavlm.rules.defaults import resolve

VOCABULARY = 160  # tokens; enough for each word of the captions to be one token
_TOKENIZER_TEXTS = 500


def slug(kind: str) -> str:
    """Return a kind of question as metrics name it."""
    return kind.replace(" ", "_")


@dataclass(frozen=True, eq=False)
class Question:
    """A held-out question. `sample` is the prompt: all tokens before the answer."""

    kind: str
    text: str
    answer: str
    sample: Sample
    canvas: NDArray[np.uint8]  # [height, width, channels]


def tokenizer_of(canvases: Canvases, *, run_dir: Path, rank: int, barrier: Callable[[], None]) -> Tokenizer:
    """Return the run's tokenizer; if there is none yet, rank 0 trains it on the first captions."""
    captions = (" ".join(canvases.dialogue(canvases.training_scene(index))) for index in range(_TOKENIZER_TEXTS))
    path = run_dir / "tokenizer.model"
    return ensure_tokenizer(captions, path, vocab_size=VOCABULARY, rank=rank, barrier=barrier)


class DigitsSource(ComputedSource):
    """An endless stream of canvases, each with a question and its answer; held-out questions for evaluation.

    A sequence is: begin token, image tokens, question, answer, end token. The answer and the end token are trained.
    """

    validation_names = tuple(map(slug, PHRASINGS))

    def __init__(self, config: Config, canvases: Canvases, tokenizer: Tokenizer) -> None:
        """Raises UserError if the sequence or the vocabulary is too small."""
        vision = config.model.vision
        self.image_token = tokenizer.image
        self.pad_token = tokenizer.pad
        self.vocab_size = resolve(config, vocab_size=tokenizer.vocab_size).model.language.vocab_size
        # Tokens of the longest answer, end token included.
        self.max_answer_tokens = MAX_DIGITS * max(len(tokenizer.encode(word)) for word in WORDS) + 1
        self._canvases = canvases
        self._tokenizer = tokenizer
        self._channels = vision.in_channels
        self._patch_size = vision.patch_size
        grid = grid_of(canvases.height, canvases.width, vision.patch_size)
        image_tokens = tokens_per_grid(grid, config.model.projector)
        self._prompts = {
            text: (tokenizer.bos, *[tokenizer.image] * image_tokens, *tokenizer.encode(text))
            for phrasings in PHRASINGS.values()
            for text in phrasings
        }
        if self.vocab_size < tokenizer.vocab_size:
            raise UserError(
                f"model.language.vocab_size {self.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}: "
                "leave it out, or set it to at least that"
            )
        needed = max(len(prompt) for prompt in self._prompts.values()) + self.max_answer_tokens
        if needed > config.train.seq_length:
            raise UserError(
                f"--seq-length {config.train.seq_length} is too short for --data digits with {image_tokens} image "
                f"tokens: set --seq-length to at least {needed}"
            )

    @classmethod
    def build(cls, config: Config, *, run_dir: Path, rank: int, barrier: Callable[[], None]) -> DigitsSource:
        """Return the source with the run's tokenizer."""
        canvases = Canvases(seed=config.train.seed, width=config.model.vision.image_size)
        return cls(config, canvases, tokenizer_of(canvases, run_dir=run_dir, rank=rank, barrier=barrier))

    def sample(self, index: int) -> Sample:
        """Return training sample `index`."""
        return self._sample(self._canvases.training_scene(index))

    def validation_sample(self, held_out: HeldOut) -> Sample:
        """Return a held-out question, as in `questions`, with its answer, which is trained."""
        return replace(self._sample(self._held_out_scene(held_out)), source=held_out.source)

    def held_out_prompt(self, held_out: HeldOut) -> HeldOutPrompt:
        """Return a held-out question with its canvas and its answer."""
        asked = self._question(self._held_out_scene(held_out))
        pixels = np.repeat(asked.canvas[:, :, :1], 3, axis=2)
        label = f"{asked.kind} {held_out.record + 1}"
        return HeldOutPrompt(asked.sample, label, asked.text, asked.answer, (pixels,))

    @property
    def answer_ends(self) -> tuple[int, ...]:
        return (self._tokenizer.eos,)

    def _held_out_scene(self, held_out: HeldOut) -> Scene:
        kinds = list(PHRASINGS)
        index = held_out.record * len(kinds) + held_out.source
        return self._canvases.held_out_scene(index, kind=kinds[held_out.source])

    def _sample(self, scene: Scene) -> Sample:
        question, answer = self._canvases.dialogue(scene)
        prompt = self._prompts[question]
        reply = (*self._tokenizer.encode(answer), self._tokenizer.eos)
        return Sample(
            tokens=np.array(prompt + reply, dtype=np.int64),
            trained=np.arange(len(prompt) + len(reply)) >= len(prompt),
            images=(self._image(lambda: self._pixels(scene)),),
        )

    def questions(self, per_kind: int) -> list[Question]:
        """Return `per_kind` held-out questions of each kind, the same in every call and every run."""
        kinds = list(PHRASINGS)
        scenes = [
            self._canvases.held_out_scene(index, kind=kinds[index % len(kinds)])
            for index in range(per_kind * len(kinds))
        ]
        return [self._question(scene) for scene in scenes]

    def with_shuffled_images(self, questions: Sequence[Question]) -> list[Question]:
        """Return the same questions, each with the canvas of another one.

        Sattolo's algorithm draws a permutation that is one cycle, which has no fixed point. A canvas may go to a
        question of another kind, because the distribution of canvases is the same for all kinds.
        """
        rng = generator(seed=0, index=len(questions))
        donors = list(questions)
        for last in range(len(donors) - 1, 0, -1):
            other = int(rng.integers(last))
            donors[last], donors[other] = donors[other], donors[last]
        return [
            replace(question, sample=replace(question.sample, images=donor.sample.images), canvas=donor.canvas)
            for question, donor in zip(questions, donors, strict=True)
        ]

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated tokens up to the end token."""
        return self._tokenizer.decode(token_ids)

    def _question(self, scene: Scene) -> Question:
        text, answer = self._canvases.dialogue(scene)
        tokens = np.array(self._prompts[text], dtype=np.int64)
        canvas = self._pixels(scene)
        images = (self._image(lambda: canvas),)
        prompt = Sample(tokens=tokens, trained=np.zeros(len(tokens), dtype=np.bool_), images=images)
        return Question(kind=scene.kind, text=text, answer=answer, sample=prompt, canvas=canvas)

    def _pixels(self, scene: Scene) -> NDArray[np.uint8]:
        """Return the pixels [height, width, channels] of a scene; the scans are grey, so all channels are equal."""
        return np.repeat(self._canvases.draw(scene)[:, :, None], self._channels, axis=2)

    def _image(self, render: Callable[[], NDArray[np.uint8]]) -> Image:
        height, width = self._canvases.height, self._canvases.width
        return Image(height=height, width=width, patch_size=self._patch_size, render=render)
