"""Findings of a run's first window of samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megavlm.config.resolve import data_kind
from megavlm.config.schema import Config
from megavlm.data.bad import BadSample
from megavlm.data.batch_sampler import Measured, Skipped
from megavlm.data.files import FilesSource, StreamSample
from megavlm.data.packing import pack
from megavlm.data.records import is_stream, open_stream, prepare_stream
from megavlm.data.sample import Picture, Sample
from megavlm.data.streaming import MAX_STREAM_WINDOW, StreamReader
from megavlm.errors import UserError
from megavlm.preview.findings import Findings, PackedSegment, Shown, SourceShare, stretches_of


def look(config: Config, *, shown: int, title: str) -> Findings:
    """The first window as a run reads it, with `shown` of its samples in full.

    Raises UserError where the run has no `--datasets`, or where they cannot be opened.
    """
    if data_kind(config) != "files":
        raise UserError("there is nothing to preview without --datasets: name your data sets, or a --config that does")
    source = FilesSource(config)
    measured = _window(config, source)
    usable = [sample for sample in measured if sample.pieces]
    skipped = [skip for sample in measured for skip in sample.skipped]
    samples, undecodable = _shown(source, usable, shown)
    return Findings(
        title=title,
        facts=_facts(config, source),
        seq_length=config.train.seq_length,
        read=len(measured),
        sources=_shares(config, source, len(measured)),
        sequences=_sequences(config, source, usable),
        skipped=(*skipped, *undecodable),
        shown=samples,
        warnings=tuple(source.warnings()),
    )


def _window(config: Config, source: FilesSource) -> list[Measured]:
    """The first samples of the run; with streams among the sources, those of its first replica if it has but one."""
    size, run_dir = config.data.packing_window, Path(config.run.run_dir)
    tars = {number: given for number, given in enumerate(config.data.datasets) if is_stream(given)}
    if not tars:
        return [source.measure(item) for item in range(size)]
    for given in tars.values():
        prepare_stream(given, run_dir=run_dir)
    seed, shuffle = config.train.seed, config.data.shuffle
    streams = {
        number: open_stream(given, run_dir=run_dir, rank=0, world=1, seed=seed, shuffle=shuffle)
        for number, given in tars.items()
    }
    items = StreamReader(source, streams, rank=0, ranks=1).read(min(size, MAX_STREAM_WINDOW))
    return [Measured(None, (), (item,)) if isinstance(item, Skipped) else source.measure(item) for item in items]


def _place(source: FilesSource, item: int | StreamSample) -> tuple[int, str]:
    """A sample's data set and its name for messages."""
    if isinstance(item, StreamSample):
        return item.source, item.label
    place = source.order.place(item)
    return place.source, source.records[place.source].label(place.record)


def _facts(config: Config, source: FilesSource) -> tuple[tuple[str, str], ...]:
    return (
        ("image processor", type(source.processor).__name__),
        ("chat template", config.data.chat_template),
        ("trained on", config.data.train_on),
        ("end of a turn", repr(source.chat.end_of_turn).strip("'") or "none"),
    )


def _shares(config: Config, source: FilesSource, read: int) -> tuple[SourceShare, ...]:
    drawn = [source.order.place(item).source for item in range(read)]
    return tuple(
        SourceShare(
            name=source.names[number],
            records=len(source.records[number]) if number in source.records else None,
            weight=given.weight,
            drawn=drawn.count(number),
        )
        for number, given in enumerate(config.data.datasets)
    )


def _sequences(config: Config, source: FilesSource, usable: list[Measured]) -> tuple[tuple[PackedSegment, ...], ...]:
    places = [_place(source, sample.item) for sample in usable]
    segments = [
        PackedSegment(label, number, piece.length, piece.images)
        for sample, (number, label) in zip(usable, places, strict=True)
        for piece in sample.pieces
    ]
    bins = [[place] for place in range(len(segments))]
    if config.data.packing:
        bins = pack([segment.length for segment in segments], config.train.seq_length)
    return tuple(tuple(segments[place] for place in sequence) for sequence in bins)


def _shown(source: FilesSource, usable: list[Measured], most: int) -> tuple[tuple[Shown, ...], list[Skipped]]:
    """Samples in full, the sources in turn, and those whose images turn out not to decode."""
    waiting: dict[int, list[int | StreamSample]] = {}
    for sample in usable:
        waiting.setdefault(_place(source, sample.item)[0], []).append(sample.item)
    found: list[Shown] = []
    bad: list[Skipped] = []
    while len(found) < most and any(waiting.values()):
        for number in sorted(waiting):
            if waiting[number] and len(found) < most:
                item = waiting[number].pop(0)
                try:
                    found.extend(_in_full(source, item)[: most - len(found)])
                except BadSample as error:
                    bad.append(source.skipped(item, error))
    return tuple(found), bad


def _in_full(source: FilesSource, item: int | StreamSample) -> list[Shown]:
    place, label = _place(source, item)
    pieces = source.pieces(item)
    return [
        Shown(
            label=f"{label}, piece {number + 1} of {len(pieces)}" if len(pieces) > 1 else label,
            source=place,
            length=len(sample),
            images=tuple(_pictures(source, sample, image) for image in sample.images),
            stretches=stretches_of(
                sample.tokens.tolist(),
                sample.trained.tolist(),
                image_token=source.image_token,
                decode=source.tokenizer.decode,
            ),
        )
        for number, sample in enumerate(pieces)
    ]


def _pictures(source: FilesSource, sample: Sample, image: Picture) -> tuple[NDArray[np.uint8], ...]:
    """What the tower sees of an image: its tiles put together, and the whole where the family has one besides."""
    processor = source.processor
    patches = image.patches().split([rows * columns for rows, columns in image.grids])
    pictures = [
        unpatchified(cells, grid, patch=processor.patch_size, mean=processor.mean, std=processor.std)
        for cells, grid in zip(patches, image.grids, strict=True)
    ]
    rows, columns = image.arrangement
    if not rows or rows * columns + 1 != len(pictures):
        return tuple(pictures)
    whole = pictures.pop(0 if sample.tile_groups else -1)
    lines = [np.concatenate(pictures[row * columns : (row + 1) * columns], axis=1) for row in range(rows)]
    return np.concatenate(lines), whole


def unpatchified(
    patches: Tensor, grid: tuple[int, int], *, patch: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> NDArray[np.uint8]:
    """[height, width, 3] bytes of row-major, normalised patches [rows·columns, 3·p·p]: `patchify` undone."""
    rows, columns = grid
    cells = patches.numpy().reshape(rows, columns, 3, patch, patch).transpose(0, 3, 1, 4, 2)
    values = cells.reshape(rows * patch, columns * patch, 3) * np.array(std) + np.array(mean)
    return np.clip(np.rint(values * 255), 0, 255).astype(np.uint8)
