"""Canvases of handwritten digits: with questions and answers in words (`DigitsSource`, the data of the demo), and with
texts that find them and are found by them (`DigitPairs`, the data of `demo-embed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megavlm.arch.image_tokens import grid_of, tokens_per_grid
from megavlm.config.schema import Config
from megavlm.data.source import ComputedSource, HeldOutPrompt, generator
from megavlm.data.synthetic import joined
from megavlm.data.tokenizers.sentence_piece import SentencePieceTokenizer, ensure_tokenizer
from megavlm.data.types import POSITIVE, QUERY, HeldOut, Sample, identity_of
from megavlm.demo.canvases import MAX_DIGITS, PHRASINGS, WORDS, Canvases, Scene
from megavlm.errors import UserError
from megavlm.inputs.patches import Image
from megavlm.rules.defaults import resolve

VOCABULARY = 160  # tokens; enough for each word of the captions to be one token
_TOKENIZER_TEXTS = 500
_KIND = "which digits"  # its answer is all that a canvas shows: the text of a pair


class _Canvas(ComputedSource):
    """What the sources of canvases share: a tokenizer of their captions, and the images."""

    def __init__(self, config: Config, canvases: Canvases, tokenizer: SentencePieceTokenizer) -> None:
        vision = config.model.vision
        self.image_token, self.pad_token = tokenizer.image, tokenizer.pad
        self.vocab_size = resolve(config, vocab_size=tokenizer.vocab_size).model.language.vocab_size
        self._canvases, self._tokenizer = canvases, tokenizer
        self._channels, self._patch_size = vision.in_channels, vision.patch_size
        assert tokenizer.begin is not None, "it is trained with one"
        grid = grid_of(canvases.height, canvases.width, vision.patch_size)
        self._begin, self._end = tokenizer.begin, tokenizer.eos
        self._image_tokens = [tokenizer.image] * tokens_per_grid(grid, config.model.projector)

    @classmethod
    def build(cls, config: Config, *, run_dir: Path, rank: int, barrier: Callable[[], None]) -> Self:
        """Return the source with the run's tokenizer; if there is none yet, rank 0 trains it on the first captions."""
        canvases = Canvases(seed=config.train.seed, width=config.model.vision.image_size)
        captions = (" ".join(canvases.dialogue(canvases.training_scene(index))) for index in range(_TOKENIZER_TEXTS))
        path = run_dir / "tokenizer.model"
        return cls(
            config,
            canvases,
            ensure_tokenizer(captions, path, vocab_size=VOCABULARY, rank=rank, barrier=barrier),
        )

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids.tolist()

    def _pixels(self, scene: Scene) -> NDArray[np.uint8]:
        """Return the pixels [height, width, channels] of a scene; the scans are grey, so all channels are equal."""
        return np.repeat(self._canvases.draw(scene)[:, :, None], self._channels, axis=2)

    def _image(self, render: Callable[[], NDArray[np.uint8]]) -> Image:
        height, width = self._canvases.height, self._canvases.width
        return Image(height=height, width=width, patch_size=self._patch_size, render=render)


def _untrained(tokens: Sequence[int], images: tuple[Image, ...] = ()) -> Sample:
    return Sample(np.array(tokens, dtype=np.int64), np.zeros(len(tokens), dtype=np.bool_), images)


class DigitsSource(_Canvas):
    """An endless stream of canvases, each with a question and its answer; held-out questions for evaluation.

    A sequence is: begin token, image tokens, question, answer, end token. The answer and the end token are trained.
    """

    validation_names = tuple(kind.replace(" ", "_") for kind in PHRASINGS)

    def __init__(self, config: Config, canvases: Canvases, tokenizer: SentencePieceTokenizer) -> None:
        """Raises UserError if the sequence or the vocabulary is too small."""
        super().__init__(config, canvases, tokenizer)
        # Tokens of the longest answer, end token included.
        self.max_answer_tokens = MAX_DIGITS * max(len(self._encoded(word)) for word in WORDS) + 1
        self._prompts = {
            text: (self._begin, *self._image_tokens, *self._encoded(text))
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
                f"--seq-length {config.train.seq_length} is too short for --data digits with {len(self._image_tokens)} "
                f"image tokens: set --seq-length to at least {needed}"
            )

    def sample(self, index: int) -> Sample:
        """Return training sample `index`."""
        return self._sample(self._canvases.training_scene(index))

    def validation_sample(self, held_out: HeldOut) -> Sample:
        """Return a held-out question, as in `questions`, with its answer, which is trained."""
        return replace(self._sample(self._held_out_scene(held_out)), source=held_out.source)

    def held_out_prompt(self, held_out: HeldOut) -> HeldOutPrompt:
        """Return a held-out question with its canvas and its answer."""
        return self._question(self._held_out_scene(held_out), held_out.record)

    @property
    def answer_ends(self) -> tuple[int, ...]:
        return (self._end,)

    def _held_out_scene(self, held_out: HeldOut) -> Scene:
        kinds = list(PHRASINGS)
        index = held_out.record * len(kinds) + held_out.source
        return self._canvases.held_out_scene(index, kind=kinds[held_out.source])

    def _sample(self, scene: Scene) -> Sample:
        question, answer = self._canvases.dialogue(scene)
        prompt = self._prompts[question]
        reply = (*self._encoded(answer), self._end)
        return Sample(
            tokens=np.array(prompt + reply, dtype=np.int64),
            trained=np.arange(len(prompt) + len(reply)) >= len(prompt),
            images=(self._image(lambda: self._pixels(scene)),),
        )

    def questions(self, per_kind: int) -> list[HeldOutPrompt]:
        places = [HeldOut(source, record) for record in range(per_kind) for source in range(len(PHRASINGS))]
        return [self.held_out_prompt(place) for place in places]

    def with_shuffled_images(self, questions: Sequence[HeldOutPrompt]) -> list[HeldOutPrompt]:
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
            replace(each, sample=replace(each.sample, images=donor.sample.images), pictures=donor.pictures)
            for each, donor in zip(questions, donors, strict=True)
        ]

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated tokens up to the end token."""
        kept = takewhile(lambda token: token != self._end, map(int, token_ids))
        return self._tokenizer.decode([token for token in kept if token != self._begin], special=False)

    def _question(self, scene: Scene, number: int) -> HeldOutPrompt:
        text, answer = self._canvases.dialogue(scene)
        pixels = self._pixels(scene)
        prompt = _untrained(self._prompts[text], (self._image(lambda: pixels),))
        picture = np.repeat(pixels[:, :, :1], 3, axis=2)
        return HeldOutPrompt(prompt, f"{scene.kind} {number + 1}", text, answer, (picture,), kind=scene.kind)


class DigitPairs(_Canvas):
    """An endless stream of canvases with what they show in words; one record in two asks for the canvas.

    Texts are: begin token, image tokens or words, end token. Canvases of the same digits are the same document. Of the
    held-out scenes, the last data set pairs each text with the canvas of the next scene: a control, by which no model
    can find anything but by chance.
    """

    validation_names = ("find_the_canvas", "find_the_text", "shuffled_canvases")

    def __init__(self, config: Config, canvases: Canvases, tokenizer: SentencePieceTokenizer) -> None:
        """Raises UserError if the sequence is too short."""
        super().__init__(config, canvases, tokenizer)
        needed = 2 * (2 + max(len(self._image_tokens), 3 * MAX_DIGITS))
        if needed > config.train.seq_length:
            raise UserError(
                f"--seq-length {config.train.seq_length} is too short for a canvas and its text: set it to at least "
                f"{needed}"
            )

    def sample(self, index: int) -> Sample:
        """Return training record `index`."""
        scene = self._canvases.training_scene(index)
        return self._record(scene, scene, asks_for_canvas=index % 2 == 0)

    def validation_sample(self, held_out: HeldOut) -> Sample:
        scene, canvas = (self._canvases.held_out_scene(held_out.record + step, kind=_KIND) for step in (0, 1))
        shuffled = held_out.source == self.validation_names.index("shuffled_canvases")
        asks_for_text = held_out.source == self.validation_names.index("find_the_text")
        shown = canvas if shuffled else scene
        return self._record(scene, shown, asks_for_canvas=not asks_for_text, source=held_out.source)

    def _record(self, said: Scene, shown: Scene, *, asks_for_canvas: bool, source: int = 0) -> Sample:
        words = self._canvases.digits_of(said)
        text = _untrained([self._begin, *self._encoded(words), self._end])
        canvas = _untrained([self._begin, *self._image_tokens, self._end], (self._image(lambda: self._pixels(shown)),))
        query, document = (text, canvas) if asks_for_canvas else (canvas, text)
        return joined([(QUERY, query, 0), (POSITIVE, document, identity_of(words))], source=source)
