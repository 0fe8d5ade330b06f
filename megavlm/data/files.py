"""`FilesSource`: the user's data sets as samples that the model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from megavlm.config.resolve import resolve
from megavlm.config.schema import Config
from megavlm.data.anyres import TileGroup
from megavlm.data.bad import BadSample, Reason
from megavlm.data.batch_sampler import Measured, Skipped
from megavlm.data.chat import ChatFormat, Piece, split
from megavlm.data.conversation import Conversation, ImageRef, Records
from megavlm.data.costs import CostModel
from megavlm.data.decode import decode, size_of
from megavlm.data.order import Order
from megavlm.data.preprocessors import model_type, processor_for, tokenizer_for, tokenizer_path
from megavlm.data.processors import Layout, Processor
from megavlm.data.records import is_stream, name_of, open_records
from megavlm.data.sample import Sample, Tiles

# Records of a stream, as far as the order of a blend is concerned.
_ENDLESS = 2**62


@dataclass(frozen=True, eq=False)
class StreamSample:
    """A sample that a stream handed out."""

    conversation: Conversation
    source: int
    label: str


class FilesSource:
    """Samples of `--datasets`: conversations as tokens, images as patches.

    An item is a number of the shuffled, blended stream (`order.py`), or a sample that a WebDataset handed out
    (`streaming.py`), which has no number. The data sets are opened when the first sample is
    asked for: ranks that are told their data never open them.
    """

    def __init__(self, config: Config) -> None:
        """Raises UserError where tokenizer, chat template or image processor are missing or do not fit the model."""
        self.processor: Processor = processor_for(config)
        self.tokenizer = tokenizer_for(config, image_text=self.processor.image_token)
        self._config = config = resolve(config, vocab_size=self.tokenizer.vocab_size)
        self.chat = ChatFormat.of(
            self.tokenizer,
            template=config.data.chat_template,
            placeholder=self.processor.placeholder,
            train_on=config.data.train_on,
            model_type=model_type(tokenizer_path(config)),
        )
        self.names = tuple(name_of(source) for source in config.data.datasets)
        self.vocab_size = config.model.language.vocab_size
        self.image_token = self.tokenizer.image
        self.pad_token = self.tokenizer.pad
        self.pixel_shuffle = config.model.projector.pixel_shuffle
        self.patch_dim = config.model.vision.in_channels * config.model.vision.patch_size**2
        self.mrope = bool(config.model.language.mrope_section)
        self.anyres_max_tiles = config.model.projector.anyres_max_tiles
        self._costs = CostModel.of(config.model)
        self._most_pixels = config.data.max_image_pixels

    def warnings(self) -> list[str]:
        """What a user should know before a run."""
        if self.chat.template is None or self.chat.end_of_turn.strip():
            return []
        return [
            "the chat template writes no mark after an answer, so the model will not learn to stop: choose another "
            "--chat-template, as vicuna"
        ]

    @cached_property
    def records(self) -> Mapping[int, Records]:
        """The data sets that are numbered. Raises UserError for one that cannot be opened."""
        sources = enumerate(self._config.data.datasets)
        return {number: open_records(source) for number, source in sources if not is_stream(source)}

    @cached_property
    def order(self) -> Order:
        data = self._config.data
        return Order(
            lengths=tuple(
                len(self.records[number]) if number in self.records else _ENDLESS
                for number in range(len(data.datasets))
            ),
            weights=tuple(source.weight for source in data.datasets),
            seed=self._config.train.seed,
            shuffle=data.shuffle,
        )

    def conversation(self, item: int | StreamSample) -> tuple[Conversation, int]:
        """A sample's conversation, and the number of its data set. Raises BadSample."""
        if isinstance(item, StreamSample):
            return item.conversation, item.source
        place = self.order.place(item)
        return self.records[place.source].read(place.record), place.source

    def pieces(self, item: int | StreamSample) -> tuple[Sample, ...]:
        return self._fitted(item)[0]

    def _fitted(self, item: int | StreamSample) -> tuple[tuple[Sample, ...], int]:
        """A sample's pieces, and how many of its turns are in none."""
        conversation, source = self.conversation(item)
        images = conversation.images
        layouts = [
            self.processor.layout(*size_of(image.source, max_pixels=self._most_pixels), images=len(images))
            for image in images
        ]
        encoded = self.chat.encode(conversation, [layout.prompt for layout in layouts])
        fitted = split(encoded, self._config.train.seq_length)
        return tuple(self._sample(piece, images, layouts, source=source) for piece in fitted.pieces), fitted.dropped

    def measure(self, item: int | StreamSample) -> Measured:
        try:
            samples, dropped = self._fitted(item)
        except BadSample as error:
            return Measured(item, (), (self.skipped(item, error),))
        measures = tuple(
            self._costs.measure(length=len(sample), grids=sample.grids, images=len(sample.images)) for sample in samples
        )
        lost: tuple[Skipped, ...] = ()
        if dropped:
            rest = BadSample(Reason.TOO_LONG, f"{dropped} of its turns do not fit --seq-length")
            lost = (replace(self.skipped(item, rest), partly=True),)
        return Measured(item, measures, lost)

    def skipped(self, item: int | StreamSample, error: BadSample) -> Skipped:
        if isinstance(item, StreamSample):
            return Skipped(item.label, self.names[item.source], error.reason, error.detail)
        place = self.order.place(item)
        label = self.records[place.source].label(place.record)
        return Skipped(label, self.names[place.source], error.reason, error.detail)

    def _sample(self, piece: Piece, images: Sequence[ImageRef], layouts: Sequence[Layout], *, source: int) -> Sample:
        shown = [(images[number], layouts[number]) for number in piece.images]
        tiled = self.processor.anyres
        return Sample(
            tokens=piece.tokens,
            trained=piece.trained,
            images=tuple(
                Tiles(
                    tuple(tile.grid for tile in layout.tiles),
                    partial(self._patches, image, images=len(images)),
                    layout.arrangement,
                )
                for image, layout in shown
            ),
            tile_groups=tuple(TileGroup(layout.arrangement, layout.size) for _, layout in shown) if tiled else (),
            source=source,
        )

    def _patches(self, image: ImageRef, *, images: int) -> Tensor:
        """All tiles' patches of one image. Raises BadSample for one that cannot be decoded."""
        pixels = decode(image.source, max_pixels=self._most_pixels).pixels
        return torch.cat(self.processor.tiles(pixels, images=images))
