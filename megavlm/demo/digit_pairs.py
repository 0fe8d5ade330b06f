"""`DigitPairs`: canvases of handwritten digits and their texts, which find one another: data of `demo-embed`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from megavlm.arch.image_tokens import grid_of, tokens_per_grid
from megavlm.config.schema import Config
from megavlm.data.members import POSITIVE, QUERY, identity_of
from megavlm.data.source import ComputedSource
from megavlm.data.synthetic_pairs import joined
from megavlm.data.tokenizers.training import Tokenizer
from megavlm.data.types import HeldOut, Sample
from megavlm.demo.canvases import MAX_DIGITS, Canvases, Scene
from megavlm.demo.digits import tokenizer_of
from megavlm.errors import UserError
from megavlm.inputs.patches import Image
from megavlm.rules.defaults import resolve

_KIND = "which digits"  # its answer is all that a canvas shows


class DigitPairs(ComputedSource):
    """An endless stream of canvases with what they show in words; one record in two asks for the canvas.

    Texts are: begin token, image tokens or words, end token. Canvases of the same digits are the same document. Of the
    held-out scenes, the last data set pairs each text with the canvas of the next scene: a control, by which no model
    can find anything but by chance.
    """

    validation_names = ("find_the_canvas", "find_the_text", "shuffled_canvases")

    def __init__(self, config: Config, canvases: Canvases, tokenizer: Tokenizer) -> None:
        """Raises UserError if the sequence is too short."""
        vision = config.model.vision
        self.image_token, self.pad_token = tokenizer.image, tokenizer.pad
        self.vocab_size = resolve(config, vocab_size=tokenizer.vocab_size).model.language.vocab_size
        self._canvases, self._tokenizer = canvases, tokenizer
        self._channels, self._patch_size = vision.in_channels, vision.patch_size
        grid = grid_of(canvases.height, canvases.width, vision.patch_size)
        self._image_tokens = tokens_per_grid(grid, config.model.projector)
        needed = 2 * (2 + max(self._image_tokens, 3 * MAX_DIGITS))
        if needed > config.train.seq_length:
            raise UserError(
                f"--seq-length {config.train.seq_length} is too short for a canvas and its text: set it to at least "
                f"{needed}"
            )

    @classmethod
    def build(cls, config: Config, *, run_dir: Path, rank: int, barrier: Callable[[], None]) -> DigitPairs:
        """Return the source with the run's tokenizer; if there is none yet, rank 0 trains it."""
        canvases = Canvases(seed=config.train.seed, width=config.model.vision.image_size)
        return cls(config, canvases, tokenizer_of(canvases, run_dir=run_dir, rank=rank, barrier=barrier))

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

    def _record(self, told: Scene, shown: Scene, *, asks_for_canvas: bool, source: int = 0) -> Sample:
        words = self._canvases.digits_of(told)
        text, canvas = self._text(words), self._canvas(shown)
        query, document = (text, canvas) if asks_for_canvas else (canvas, text)
        return joined([(QUERY, query, 0), (POSITIVE, document, identity_of(words))], source=source)

    def _text(self, words: str) -> Sample:
        tokens = np.array([self._tokenizer.bos, *self._tokenizer.encode(words), self._tokenizer.eos], dtype=np.int64)
        return Sample(tokens, np.zeros(len(tokens), dtype=np.bool_))

    def _canvas(self, scene: Scene) -> Sample:
        inside = [self._tokenizer.image] * self._image_tokens
        tokens = np.array([self._tokenizer.bos, *inside, self._tokenizer.eos], dtype=np.int64)
        height, width = self._canvases.height, self._canvases.width
        image = Image(
            height=height,
            width=width,
            patch_size=self._patch_size,
            render=lambda: np.repeat(self._canvases.draw(scene)[:, :, None], self._channels, axis=2),
        )
        return Sample(tokens, np.zeros(len(tokens), dtype=np.bool_), (image,))
