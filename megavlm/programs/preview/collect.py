"""Collect what the preview shows: a run's first packing window of samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megavlm.arch.packing import pack
from megavlm.config.option import data_kind
from megavlm.config.schema import Config
from megavlm.data.files import FilesSource
from megavlm.data.streaming import files_source
from megavlm.data.types import EncodedRecord, Picture, Sample, Segment, Skipped
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample
from megavlm.inputs.processor import Processor
from megavlm.programs.preview.content import PackedSegment, PreviewContent, Shown, SourceShare, stretches_of
from megavlm.rules.defaults import resolve


def look(config: Config, *, shown: int, title: str) -> PreviewContent:
    """Return what the run reads first: one packing window, of which `shown` samples have their text and images.

    Raises UserError if the run has no `--datasets` or they cannot be opened.
    """
    if data_kind(config) != "files":
        raise UserError("there is nothing to preview without --datasets: name your data sets, or a --config that does")
    config = resolve(config)
    source = files_source(config)
    records = source.first_window()
    usable = [record for record in records if record.samples]
    skipped = [skip for record in records for skip in record.skipped]
    samples, undecodable = _shown(source, usable, shown)
    return PreviewContent(
        title=title,
        facts=_facts(config, source),
        seq_length=config.train.seq_length,
        read=len(records),
        sources=_shares(source, len(records)),
        sequences=_sequences(config, source, usable),
        skipped=(*skipped, *undecodable),
        shown=samples,
        warnings=tuple(source.warnings()),
    )


def _facts(config: Config, source: FilesSource) -> tuple[tuple[str, str], ...]:
    return (
        ("image processor", type(source.processor).__name__),
        ("chat template", config.data.chat_template),
        ("trained on", config.data.train_on),
        ("end of a turn", repr(source.chat.end_of_turn).strip("'") or "none"),
    )


def _shares(source: FilesSource, read: int) -> tuple[SourceShare, ...]:
    drawn = [source.order.record(number).source for number in range(read)]
    return tuple(
        SourceShare(name=each.name, records=each.records, share=each.share or 0.0, drawn=drawn.count(number))
        for number, each in enumerate(source.data_sets())
    )


def _sequences(
    config: Config, source: FilesSource, usable: list[EncodedRecord]
) -> tuple[tuple[PackedSegment, ...], ...]:
    segments = [
        PackedSegment(_label(source, record)[1], sample.source, sample.cost.length, sample.cost.images)
        for record in usable
        for sample in record.samples
    ]
    bins = [[index] for index in range(len(segments))]
    if config.data.packing:
        bins = pack([segment.length for segment in segments], config.train.seq_length)
    return tuple(tuple(segments[index] for index in indices) for indices in bins)


def _shown(source: FilesSource, usable: list[EncodedRecord], most: int) -> tuple[tuple[Shown, ...], list[Skipped]]:
    """Return at most `most` samples with images, from each data set in turn, and those whose images are broken."""
    waiting: dict[int, list[EncodedRecord]] = {}
    for record in usable:
        waiting.setdefault(_label(source, record)[0], []).append(record)
    found: list[Shown] = []
    bad: list[Skipped] = []
    while len(found) < most and any(waiting.values()):
        for number in sorted(waiting):
            if waiting[number] and len(found) < most:
                record = waiting[number].pop(0)
                assert record.sample_id is not None
                try:
                    found.extend(_in_full(source, record)[: most - len(found)])
                except BadSample as error:
                    bad.append(source.skipped(record.sample_id, error))
    return tuple(found), bad


def _label(source: FilesSource, record: EncodedRecord) -> tuple[int, str]:
    """Return the index of a record's data set, and its name in messages."""
    assert record.sample_id is not None, "skipped records have no samples"
    return source.label(record.sample_id)


def _in_full(source: FilesSource, record: EncodedRecord) -> list[Shown]:
    assert record.sample_id is not None
    index, label = _label(source, record)
    samples = [source.load(Segment(record.sample_id, encoded)) for encoded in record.samples]
    return [
        Shown(
            label=f"{label}, piece {number + 1} of {len(samples)}" if len(samples) > 1 else label,
            source=index,
            length=len(sample),
            images=tuple(_pictures(source, sample, image) for image in sample.images),
            seconds=tuple(image.film.seconds if image.film else () for image in sample.images),
            stretches=stretches_of(
                sample.tokens.tolist(),
                sample.trained.tolist(),
                image_tokens=source.feature_tokens,
                video_tokens=set(source.feature_tokens) - {source.image_token},
                decode=source.tokenizer.decode,
            ),
        )
        for number, sample in enumerate(samples)
    ]


def _pictures(source: FilesSource, sample: Sample, image: Picture) -> tuple[NDArray[np.uint8], ...]:
    """Return the pixels of an image that the tower receives, as pictures uint8 [height, width, 3].

    A tiled image gives its tiles joined and, if there is one, the tile with the whole image.
    """
    processor = source.processor
    if image.film is not None:
        return _frames(processor, image)
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


def _frames(processor: Processor, video: Picture) -> tuple[NDArray[np.uint8], ...]:
    """Return the frames of a video that the tower receives, as pictures."""
    assert processor.video is not None
    assert video.film is not None
    span, patch = processor.video.frames_per_patch, processor.patch_size
    groups = video.patches().unflatten(1, (3, span, -1)).movedim(2, 0)  # [span, P, 3, p·p]
    sizes = [rows * columns for rows, columns in video.grids]
    by_frame = [group.flatten(1).split(sizes) for group in groups]
    pictures = [
        unpatchified(by_frame[place][number], grid, patch=patch, mean=processor.video.mean, std=processor.video.std)
        for number, grid in enumerate(video.grids)
        for place in range(span)
    ]
    return tuple(pictures[: len(video.film.frames)])


def unpatchified(
    patches: Tensor, grid: tuple[int, int], *, patch: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> NDArray[np.uint8]:
    """Return the pixels [height, width, 3] of row-major, normalised patches [rows·columns, 3·p·p]: undo `patchify`."""
    rows, columns = grid
    cells = patches.numpy().reshape(rows, columns, 3, patch, patch).transpose(0, 3, 1, 4, 2)
    values = cells.reshape(rows * patch, columns * patch, 3) * np.array(std) + np.array(mean)
    return np.clip(np.rint(values * 255), 0, 255).astype(np.uint8)
