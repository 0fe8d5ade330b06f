"""Read the user's data sets as samples: each record is read, templated and tokenised once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from megavlm.arch.image_tokens import TileGroup
from megavlm.arch.objectives import objective_of
from megavlm.config.schema import Config, DatasetConfig
from megavlm.data.chat import ChatFormat, Piece, split
from megavlm.data.costs import CostModel
from megavlm.data.members import QUERY, Member
from megavlm.data.order import Order, weights_of
from megavlm.data.pairs import encode_pairs, text_tokens
from megavlm.data.preprocessors import model_type, processor_for, tokenizer_for, tokenizer_path
from megavlm.data.reads import Reads
from megavlm.data.records import Records, cache_of, is_held_out, is_stream, name_of, open_records, open_tars
from megavlm.data.types import (
    Conversation,
    EncodedRecord,
    EncodedSample,
    HeldOut,
    Sample,
    SampleId,
    Segment,
    Skipped,
    StreamSample,
    Turn,
    VideoRef,
)
from megavlm.data.visuals import Visuals, stored
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Film, Layout
from megavlm.inputs.processor import Processor
from megavlm.inputs.sampling import Budget
from megavlm.rules.defaults import resolve

# The number of records that the order of a blend assumes for a stream, whose length is unknown.
_ENDLESS = 2**62


class FilesSource:
    """Reads samples of `--datasets`: conversations as tokens, images as patches.

    A sample is identified by its number in the shuffled blend (`order.py`), or carries its conversation if a WebDataset
    yielded it (`streaming.py`). The data sets are opened when the first sample is read, so that ranks that receive
    their data by broadcast never open them.
    """

    def __init__(self, config: Config) -> None:
        """Load the tokenizer, the chat template and the image processor.

        Raises UserError if one of them is missing or does not fit the model.
        """
        self.processor: Processor = processor_for(config)
        self.tokenizer = tokenizer_for(config, image_text=self.processor.image_token)
        self._embeds = objective_of(config.model).embeds
        self._config = config = resolve(config, vocab_size=self.tokenizer.vocab_size)
        self.chat = ChatFormat.of(
            self.tokenizer,
            template=config.data.chat_template,
            placeholder=self.processor.placeholder,
            train_on=config.data.train_on,
            model_type=model_type(tokenizer_path(config)),
            reserved=(self.processor.video.text,) if self.processor.video is not None else (),
            videos_as_text=self.processor.video is not None and self.processor.video.as_text,
        )
        self.names = tuple(name_of(source) for source in config.data.datasets)
        self.validation_names = tuple(name_of(source) for source in self._validation)
        self.vocab_size = config.model.language.vocab_size
        self.image_token = self.tokenizer.image
        self.feature_tokens = (self.image_token, *filter(None, [config.model.video_token]))
        self.pad_token = self.tokenizer.pad
        self._costs = CostModel.of(config.model)
        self.max_pixels = config.data.max_image_pixels
        self._visuals = Visuals(self.processor, self.max_pixels, _budget(self.processor, config))
        self.reads = Reads(config.data.worker_timeout)
        """Knows which record is encoded, for those who wait for the first ones."""
        self.stream_lengths: Mapping[int, int] = {}
        """Are the numbers of samples of streams, once they are counted."""

    def warnings(self) -> list[str]:
        """Return the warnings to print before a run. Raises UserError for a data set that cannot be opened."""
        found = [
            f"--datasets {records.name}: {', '.join(records.unread)} is not read, and no image: to read it as one, add "
            f"columns=image:{records.unread[0]}"
            for records in self.records.values()
            if records.unread
        ]
        trained = {Path(each.path).absolute() for each in self._config.data.datasets}
        found += [
            f"--validation {name_of(each)} is also in --datasets: its loss is of samples that are trained on. To hold "
            "some of them out, give --validation-split 0.05 in its place"
            for each in self._config.data.validation
            if Path(each.path).absolute() in trained
        ]
        if self.chat.template is not None and not self.chat.end_of_turn.strip():
            found.append(
                "the chat template writes no end-of-turn token after an answer, so the model will not learn to stop: "
                "choose another --chat-template, as vicuna"
            )
        return found

    @cached_property
    def records(self) -> Mapping[int, Records]:
        """Return the map-style data sets by index. Raises UserError for one that cannot be opened."""
        sources = enumerate(self._config.data.datasets)
        return {number: open_records(each, pairs=self._embeds) for number, each in sources if not is_stream(each)}

    @property
    def _validation(self) -> tuple[DatasetConfig, ...]:
        """Return the data sets of which validation samples are part: `--validation`, or those of a split."""
        data = self._config.data
        return data.datasets if data.validation_split else data.validation

    @cached_property
    def validation_records(self) -> Sequence[Records]:
        """Return the validation data sets. Raises UserError for one that cannot be opened."""
        cache, split = cache_of(Path(self._config.run.run_dir)), self._config.data.validation_split > 0
        try:
            return [
                open_tars(source, cache=cache)
                if is_stream(source)
                else (self.records[number] if split else open_records(source, pairs=self._embeds))
                for number, source in enumerate(self._validation)
            ]
        except UserError as error:
            raise UserError(str(error).replace("--datasets", "--validation", 1)) from error

    def held_out(self, source: int, numbers: Sequence[int]) -> list[int]:
        """Return those of the records of a validation data set that belong to its validation samples: all, or those of
        a split that can be read.
        """
        if not self._config.data.validation_split:
            return list(numbers)
        records = self.validation_records[source]
        return [number for number in numbers if self._is_held_out(records, number)]

    def _is_held_out(self, records: Records, number: int) -> bool:
        try:
            return is_held_out(records.key(number), self._config.data.validation_split)
        except BadSample:  # it is skipped, and counted, where it is read
            return False

    @property
    def shares_known(self) -> bool:
        """Return whether it is known how data sets are mixed: by weights, or by their lengths, which streams have only
        once they are counted.
        """
        datasets = self._config.data.datasets
        streams = {number for number, source in enumerate(datasets) if is_stream(source)}
        weighted = any(source.weight is not None for source in datasets)
        return weighted or len(datasets) == 1 or streams <= set(self.stream_lengths)

    @cached_property
    def order(self) -> Order:
        data = self._config.data
        assert self.shares_known, "streams that have no weight are counted before they are read"
        return Order(
            lengths=tuple(
                len(self.records[number]) if number in self.records else self.stream_lengths.get(number, _ENDLESS)
                for number in range(len(data.datasets))
            ),
            weights=weights_of([source.weight for source in data.datasets]),
            seed=self._config.train.seed,
            shuffle=data.shuffle,
        )

    def conversation(self, sample_id: SampleId) -> tuple[Conversation, int]:
        """Return a sample's conversation and the index of its data set. Raises BadSample."""
        if isinstance(sample_id, StreamSample):
            return sample_id.conversation, sample_id.source
        if isinstance(sample_id, HeldOut):
            return self.validation_records[sample_id.source].read(sample_id.record), sample_id.source
        ref = self.order.record(sample_id)
        return self.records[ref.source].read(ref.record), ref.source

    def place(self, sample_id: SampleId) -> tuple[int, int]:
        """Return the data set and the record of a numbered sample, alike for all samples of that record; of any other
        sample its own identity.
        """
        if not isinstance(sample_id, int):
            return -1, id(sample_id)
        ref = self.order.record(sample_id)
        return ref.source, ref.record

    def encode(self, sample_id: SampleId) -> EncodedRecord:
        """Read a record and the headers of its images, and return its tokens and costs.

        A record is encoded once; a bad one is reported in `skipped`. Encoded images have a number and no bytes, so
        that a window of encoded samples stays small. A sample of the training data that is held out has no tokens.
        """
        with self.reads.reading(lambda: f"sample {self.name(sample_id)[1]}"):
            return self._encode(sample_id)

    def _encode(self, sample_id: SampleId) -> EncodedRecord:
        if isinstance(sample_id, int) and self._config.data.validation_split:
            ref = self.order.record(sample_id)
            if self._is_held_out(self.records[ref.source], ref.record):
                return EncodedRecord(())
        try:
            conversation, source = self.conversation(sample_id)
            images = conversation.images
            layouts = self._visuals.layouts(images)
            if self._embeds:
                return self._encoded_pairs(sample_id, conversation, layouts, source=source)
            encoded = self.chat.encode(conversation, [layout.prompt for layout in layouts])
            fitted = split(encoded, self._config.train.seq_length)
        except BadSample as error:
            return EncodedRecord((), (self.skipped(sample_id, error),))
        samples = tuple(self._encoded(piece, layouts, source=source) for piece in fitted.pieces)
        return EncodedRecord(samples, self._lost(sample_id, fitted.dropped, "turns"))

    def _encoded_pairs(
        self, sample_id: SampleId, record: Conversation, layouts: Sequence[Layout], *, source: int
    ) -> EncodedRecord:
        """Return the texts of a record of pairs as one sample. Raises BadSample."""
        if not record.identities:
            raise BadSample(Reason.NOT_A_RECORD, "it has no query and positives, which --objective compares")
        options, length = self._config.model.objective, self._config.train.seq_length
        found = encode_pairs(record, [each.prompt for each in layouts], self.chat, options, seq_length=length)
        whole = self._encoded(found.piece, layouts, source=source)
        texts = [self._costs.cost(length=member.length, grids=(), images=0).language for member in found.members]
        sample = replace(whole, members=found.members, cost=replace(whole.cost, language=sum(texts)))
        return EncodedRecord((sample,), self._lost(sample_id, found.dropped, "negatives"))

    def _lost(self, sample_id: SampleId, dropped: int, what: str) -> tuple[Skipped, ...]:
        """Return the report of so many parts of a record that are too long, if there are any."""
        if not dropped:
            return ()
        error = BadSample(Reason.TOO_LONG, f"{dropped} of its {what} do not fit into --seq-length and are left out")
        return (replace(self.skipped(sample_id, error), partly=True),)

    def load(self, segment: Segment) -> Sample:
        """Return the sample of an encoded segment with the patches of its images. Raises BadSample."""
        encoded = segment.encoded
        assert encoded is not None, "samples of files are encoded before they are packed"
        images = self.conversation(segment.sample_id)[0].images if encoded.images else ()
        return Sample(
            tokens=encoded.tokens,
            trained=encoded.trained,
            images=tuple(self._visuals.load(images, image) for image in encoded.images),
            tile_groups=encoded.tile_groups,
            source=encoded.source,
            members=encoded.members,
        )

    def prompt(self, conversation: Conversation) -> Sample:
        """Return a conversation that ends with a question as the sample that a model continues with its answer.

        Raises BadSample.
        """
        images = conversation.images
        layouts = self._visuals.layouts(images)
        tokens = self.chat.prompt(conversation, [layout.prompt for layout in layouts])
        return Sample(
            tokens=tokens,
            trained=np.zeros(len(tokens), dtype=np.bool_),
            images=tuple(self._visuals.load(images, stored(*each)) for each in enumerate(layouts)),
            tile_groups=self._tile_groups(layouts),
        )

    def embedded(self, text: Turn) -> Sample:
        """Return a query or a document, as its role says, as the sample that a model embeds. Raises BadSample."""
        layouts = self._visuals.layouts(text.images)
        options, prompts = self._config.model.objective, [layout.prompt for layout in layouts]
        tokens = text_tokens(text, prompts, self.chat, options)
        return Sample(
            tokens=tokens,
            trained=np.zeros(len(tokens), dtype=np.bool_),
            images=tuple(self._visuals.load(text.images, stored(*each)) for each in enumerate(layouts)),
            tile_groups=self._tile_groups(layouts),
            members=(Member(QUERY, 0, len(tokens), len(layouts)),),
        )

    def film_of(self, video: VideoRef) -> Film:
        """Return the frames of a video that the model receives. Raises BadSample if it reads none, or not this one."""
        (layout,) = self._visuals.layouts([video])
        assert layout.film is not None
        return layout.film

    @property
    def answer_ends(self) -> tuple[int, ...]:
        """Return the tokens before which an answer ends: the tokenizer's, and that of the chat template."""
        mark = self.chat.end_of_turn.strip()
        ids = self.tokenizer.encode(mark).ids.tolist() if mark else []
        return tuple(sorted({self.tokenizer.eos, *(ids if len(ids) == 1 else [])}))

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated tokens without special ones."""
        return self.tokenizer.decode(token_ids, special=False).strip()

    def skipped(self, sample_id: SampleId, error: BadSample) -> Skipped:
        source, label = self.name(sample_id)
        return Skipped(label, source, error.reason, error.detail)

    def name(self, sample_id: SampleId) -> tuple[str, str]:
        """Return the names of a sample's data set and of the sample in messages."""
        source, label = self.label(sample_id)
        return (self.validation_names if isinstance(sample_id, HeldOut) else self.names)[source], label

    def label(self, sample_id: SampleId) -> tuple[int, str]:
        """Return the index of a sample's data set, and the sample's name in messages."""
        if isinstance(sample_id, StreamSample):
            return sample_id.source, sample_id.label
        if isinstance(sample_id, HeldOut):
            return sample_id.source, self.validation_records[sample_id.source].label(sample_id.record)
        ref = self.order.record(sample_id)
        return ref.source, self.records[ref.source].label(ref.record)

    def _encoded(self, piece: Piece, layouts: Sequence[Layout], *, source: int) -> EncodedSample:
        shown = [(number, layouts[number]) for number in piece.images]
        images = tuple(stored(number, layout) for number, layout in shown)
        return EncodedSample(
            tokens=piece.tokens,
            trained=piece.trained,
            images=images,
            tile_groups=self._tile_groups([layout for _, layout in shown]),
            source=source,
            cost=self._costs.cost(
                length=len(piece), grids=[grid for image in images for grid in image.grids], images=len(images)
            ),
        )

    def _tile_groups(self, layouts: Sequence[Layout]) -> tuple[TileGroup, ...]:
        """Return the tiles of each image, for a model that reads images as tiles of several resolutions."""
        if not self.processor.anyres:
            return ()
        return tuple(group for layout in layouts for group in layout.tile_groups)


def _budget(processor: Processor, config: Config) -> Budget:
    """Return the budget of each video: what the options say, else what is usual for the model."""
    usual, data = Budget() if processor.video is None else processor.video.usual, config.data
    return replace(
        usual,
        fps=data.video_fps or usual.fps,
        max_frames=data.video_max_frames or usual.max_frames,
        max_tokens=data.video_max_tokens or config.train.seq_length // 2,
    )
