"""Define the source of samples of users' data sets: records are read, rendered with the template and tokenised."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path

import torch

from megavlm.config.schema import Config, DatasetConfig
from megavlm.data.collate import CollateSpec
from megavlm.data.collator import Collator, FileCollator, OwnImages
from megavlm.data.prompts import PromptTokens, choose_prompts, prompt_tokens
from megavlm.data.records import Records, is_held_out, name_of, open_records
from megavlm.data.sample_encoder import Encoder
from megavlm.data.sample_order import Order, RecordRef, spread, weights_of
from megavlm.data.sampler import BatchSampler, PackedBatchSampler, Windows, bins_of
from megavlm.data.source import DataSetShare, HeldOutPrompt, Source
from megavlm.data.types import Conversation, EncodedRecord, HeldOut, Sample, SampleId, Segment
from megavlm.data.visuals import Augmentation, names_places
from megavlm.data.workers import WorkerPool
from megavlm.errors import UserError, one_line
from megavlm.inputs.bad_sample import BadSample, Reason, Skipped, SkipSummary
from megavlm.resilience.events import record

MEASURED = 8192  # most records, plus one window, that are encoded to count sequences: about ten seconds
_LOOKED_AT = 100  # most validation samples that are encoded to find a usable one


class FilesSource(Encoder, Source):
    """Reads samples of `--datasets`: conversations as tokens, images as patches.

    A sample is identified by its number in the shuffled blend (`sample_order.py`). The data sets are opened when the
    first sample is read, so that ranks that receive their data by broadcast never open them.
    """

    is_read = True

    def __init__(self, config: Config) -> None:
        """Load the tokenizer, chat template and image processor. Raises UserError if one is missing or does not fit."""
        super().__init__(config)
        self.names = tuple(name_of(source) for source in config.data.datasets)
        self.validation_names = tuple(name_of(source) for source in self._validation)

    def warnings(self) -> list[str]:
        """Return the warnings to print before a run. Raises UserError for a data set that cannot be opened."""
        found = [
            f"--datasets {records.name}: {', '.join(records.unread)} is not read, and no image: to read it as one, add "
            f"columns=image:{records.unread[0]}"
            for records in self.records
            if records.unread
        ]
        trained = {Path(each.path).absolute() for each in self.config.data.datasets}
        found += [
            f"--validation {name_of(each)} is also in --datasets: its loss is of samples that are trained on. To hold "
            "some of them out, give --validation-split 0.05 in its place"
            for each in self.config.data.validation
            if Path(each.path).absolute() in trained
        ]
        if self.chat.template is not None and not self.chat.end_of_turn.strip():
            found.append(
                "the chat template writes no end-of-turn token after an answer, so the model will not learn to stop: "
                "choose another --chat-template, as vicuna"
            )
        return found

    @cached_property
    def records(self) -> Sequence[Records]:
        """Return the training data sets. Raises UserError for a data set that cannot be opened."""
        return [open_records(each, pairs=self.embeds, answers=self.compares) for each in self.config.data.datasets]

    @property
    def _validation(self) -> tuple[DatasetConfig, ...]:
        """Return the data sets with validation samples: `--validation`, or `--datasets` with `--validation-split`."""
        data = self.config.data
        return data.datasets if data.validation_split else data.validation

    @cached_property
    def validation_records(self) -> Sequence[Records]:
        """Return the validation data sets. Raises UserError for a data set that cannot be opened."""
        if self.config.data.validation_split:
            return self.records
        try:
            return [open_records(source, pairs=self.embeds, answers=self.compares) for source in self._validation]
        except UserError as error:
            raise UserError(str(error).replace("--datasets", "--validation", 1)) from error

    def held_out(self, source: int, numbers: Sequence[int]) -> list[int]:
        """Return the record numbers of a validation data set that are validation samples.

        These are all `numbers`, or with `--validation-split` those held out; unreadable records are not.
        """
        if not self.config.data.validation_split:
            return list(numbers)
        records = self.validation_records[source]
        return [number for number in numbers if self._is_held_out(records, number)]

    def _is_held_out(self, records: Records, number: int) -> bool:
        try:
            return is_held_out(records.key(number), self.config.data.validation_split)
        except BadSample:  # reading the record skips and counts it
            return False

    @cached_property
    def order(self) -> Order:
        data = self.config.data
        return Order(
            lengths=tuple(map(len, self.records)),
            weights=weights_of([source.weight for source in data.datasets]),
            seed=self.config.train.seed,
            shuffle=data.shuffle,
        )

    def _at(self, sample_id: int | HeldOut) -> tuple[Records, RecordRef]:
        """Return the data set of a sample, and the address of its record."""
        if isinstance(sample_id, HeldOut):
            return self.validation_records[sample_id.source], RecordRef(sample_id.source, sample_id.record, 0)
        ref = self.order.record(sample_id)
        return self.records[ref.source], ref

    def conversation(self, sample_id: SampleId) -> tuple[Conversation, int]:
        """Return a sample's conversation and the index of its data set. Raises BadSample."""
        records, ref = self._at(sample_id)
        return records.read(ref.record), ref.source

    def place(self, sample_id: SampleId) -> tuple[int, int]:
        """Return (data set, record number) of a sample; samples of the same record have the same place."""
        ref = self._at(sample_id)[1]
        return ref.source, ref.record

    def encode(self, sample_id: SampleId) -> EncodedRecord:
        """Read a record and the headers of its images, and return its samples with tokens and costs.

        A bad record has no samples and is reported in `skipped`. Encoded images are numbers without bytes, so that a
        window of encoded samples stays small. A training sample whose record is held out has no samples.
        """
        if isinstance(sample_id, int) and self.config.data.validation_split:
            records, ref = self._at(sample_id)
            if self._is_held_out(records, ref.record):
                return EncodedRecord(())
        try:
            conversation, source = self.conversation(sample_id)
            samples, left_out = self.encoded(conversation, source=source)
        except BadSample as error:
            return EncodedRecord((), (self.skipped(sample_id, error),))
        if not left_out:
            return EncodedRecord(samples)
        too_long = BadSample(Reason.TOO_LONG, f"{left_out} do not fit into --seq-length and are left out")
        return EncodedRecord(samples, (replace(self.skipped(sample_id, too_long), partly=True),))

    def load(self, segment: Segment) -> Sample:
        """Return the sample of an encoded segment with the patches of its images. Raises BadSample."""
        encoded = segment.encoded
        assert encoded is not None, "samples of files are encoded before they are packed"
        conversation = self.conversation(segment.sample_id)[0] if encoded.images else Conversation(())
        images, augmentation = conversation.images, self._augmentation(segment.sample_id, conversation)
        beside = [text.images for text in conversation.texts() for _ in text.images]
        return Sample(
            tokens=encoded.tokens,
            trained=encoded.trained,
            images=tuple(
                self.visuals.load(images, each, augmentation, beside=beside[each.number])
                for each in encoded.images
                if each.grids
            ),
            sounds=tuple(self.visuals.sound(images, each) for each in encoded.images if each.frames),
            tile_groups=encoded.tile_groups,
            source=encoded.source,
            members=encoded.members,
        )

    def _augmentation(self, sample_id: SampleId, conversation: Conversation) -> Augmentation | None:
        """Return the augmentation of a sample's images; None for validation samples, or if none is set."""
        options = self.config.data
        if isinstance(sample_id, HeldOut) or (options.augment_crop == 1 and not options.augment_color):
            return None
        ref = self.order.record(sample_id)
        crop = 1.0 if options.augment_crop == 1 or names_places(conversation) else options.augment_crop
        place = f"{self.config.train.seed}/{ref.source}/{ref.record}/{ref.epoch}"
        return Augmentation(crop, options.augment_color, place)

    def loaded(self, record: EncodedRecord) -> list[Sample]:
        """Return the samples of a record with the patches of their images. Raises BadSample."""
        assert record.sample_id is not None
        return [self.load(Segment(record.sample_id, encoded)) for encoded in record.samples]

    def sequences(self, lengths: Sequence[int]) -> int:
        """Return the number of sequences that samples of these lengths fill, packed as in the run."""
        return len(bins_of(lengths, seq_length=self.config.train.seq_length, packing=self.config.data.packing))

    def skipped(self, sample_id: SampleId, error: BadSample) -> Skipped:
        source, label = self.name(sample_id)
        return Skipped(label, source, error.reason, error.detail)

    def name(self, sample_id: SampleId) -> tuple[str, str]:
        """Return, for messages, the name of a sample's data set and the label of its record."""
        source, label = self.label(sample_id)
        return (self.validation_names if isinstance(sample_id, HeldOut) else self.names)[source], label

    def label(self, sample_id: SampleId) -> tuple[int, str]:
        """Return the index of a sample's data set, and the label of its record in messages."""
        records, ref = self._at(sample_id)
        return ref.source, records.label(ref.record)

    # --- Interface of every source

    def worker_pool(self, device: torch.device) -> WorkerPool | None:
        """Start the worker processes of `--num-workers`; None for 0. Replaced workers are printed and recorded."""
        data, run_dir = self.config.data, Path(self.config.run.run_dir)

        def report(line: str) -> None:
            print(f"warning: {one_line(line)}", file=sys.stderr, flush=True)
            record(run_dir, "worker", reason=line)

        if not data.num_workers:
            return None
        return WorkerPool(self, data.num_workers, timeout=data.worker_timeout, device=device, report=report)

    def collator(
        self, spec: CollateSpec, *, own_images: OwnImages | None = None, pool: WorkerPool | None = None
    ) -> FileCollator:
        return FileCollator(self, spec, packing=self.config.data.packing, pool=pool)

    def sampler(self, config: Config, collator: Collator) -> BatchSampler:
        windows, train = self.windows(config), config.train
        return PackedBatchSampler(
            lambda number: collator.window(windows.samples(number)),
            count=train.global_batch_size,
            windows=windows,
            seq_length=train.seq_length,
        )

    def data_sets(self) -> list[DataSetShare]:
        each = zip(self.names, self.records, self.order.shares, strict=True)
        return [DataSetShare(name, len(records), share) for name, records, share in each]

    def windows(self, config: Config) -> Windows:
        epoch = sum(map(len, self.records))
        return Windows(config.data.packing_window, epoch, within_epochs=config.train.epochs is not None)

    def window_lengths(self, windows: Windows) -> Iterator[tuple[int, list[int]]]:
        """Yield the number of samples and the sample lengths of each window, until more than MEASURED records were
        encoded. Each record is encoded once, even if it occurs several times.
        """
        known: dict[tuple[int, int], list[int]] = {}
        for number in count():
            lengths: list[int] = []
            for sample in (numbers := windows.samples(number)):
                place = self.place(sample)
                if place not in known:
                    known[place] = [len(each.tokens) for each in self.encode(sample).samples]
                lengths += known[place]
            yield len(numbers), lengths
            if len(known) > MEASURED:
                return

    def first_window(self) -> list[EncodedRecord]:
        """Return the records of the first packing window."""
        return self.collator(CollateSpec.of(self.config, self)).encode(range(self.config.data.packing_window))

    def first_records(self, number: int) -> list[tuple[tuple[int, int], EncodedRecord]]:
        return [(self.place(sample), self.encode(sample)) for sample in range(number)]

    def validation_samples(self, config: Config) -> tuple[HeldOut, ...]:
        parts = [self.held_out(number, range(len(records))) for number, records in enumerate(self.validation_records)]
        samples = spread(parts)
        if not samples:
            raise UserError(
                f"--validation-split {config.data.validation_split} holds out none of "
                f"{sum(map(len, self.validation_records)):,} records: raise it, or name data sets with --validation"
            )
        skipped = SkipSummary()
        for sample in (first := samples[:_LOOKED_AT]):
            record = self.encode(sample)
            if record.samples:
                return samples
            skipped.add(record.skipped)
        raise UserError(f"none of the first {len(first)} samples can be used: {skipped.message()}")

    def prompts(self, config: Config, samples: Sequence[HeldOut]) -> tuple[HeldOutPrompt, ...]:
        return choose_prompts(config, self, samples)

    def prompts_as_tokens(self) -> Iterator[PromptTokens]:
        """Yield the prompt tokens of each record that has an answer."""
        return prompt_tokens(self)
