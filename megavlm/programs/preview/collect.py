"""Collect what the preview shows: a run's first packing window of samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megavlm.config.option import data_kind
from megavlm.config.schema import Config
from megavlm.data.file_source import FilesSource
from megavlm.data.sampler import bins_of
from megavlm.data.streaming import files_source
from megavlm.data.types import EncodedRecord, Picture, Sample, Segment
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Skipped
from megavlm.inputs.processor import Processor
from megavlm.rules.defaults import resolve

Decode = Callable[[Sequence[int]], str]
_CONTEXT = 8  # tokens that are decoded together with those after them


@dataclass(frozen=True)
class Stretch:
    """Holds the text of neighbouring tokens that are all trained or all not; that of image tokens is their number."""

    text: str
    trained: bool
    image: bool = False
    video: bool = False  # image tokens of a video


@dataclass(frozen=True, eq=False)
class Shown:
    """Holds a sample with its text and images; each image is the pictures of it that the vision tower receives."""

    label: str
    source: int
    length: int
    images: tuple[tuple[NDArray[np.uint8], ...], ...]  # [height, width, 3] each
    seconds: tuple[tuple[float, ...], ...]  # when the frames of each video are shown; () for an image
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class SourceShare:
    """Describes a data set and how many of the previewed samples are from it."""

    name: str
    records: int | None  # None for a stream
    share: float  # of the samples of a run
    drawn: int  # number of the previewed samples


@dataclass(frozen=True)
class PreviewContent:
    """Describes one packing window: how full its sequences are, which samples are skipped, and some in full."""

    title: str
    facts: tuple[tuple[str, str], ...]
    read: int
    sources: tuple[SourceShare, ...]
    skipped: tuple[Skipped, ...]
    shown: tuple[Shown, ...]
    warnings: tuple[str, ...] = ()


def stretches_of(
    tokens: Sequence[int],
    trained: Sequence[bool],
    *,
    image_tokens: Collection[int],
    decode: Decode,
    video_tokens: Collection[int] = (),
) -> tuple[Stretch, ...]:
    """Return a sample's text in stretches: a new one begins where training begins or ends, and at images.

    `video_tokens` are those of the image tokens that stand for videos alone.

    Each stretch is decoded together with the tokens before it, because a tokenizer's spaces depend on them.
    """
    found: list[Stretch] = []
    at = 0
    while at < len(tokens):
        image, video = tokens[at] in image_tokens, tokens[at] in video_tokens
        kind, end = (image, video), at + 1
        while end < len(tokens) and trained[end] == trained[at]:
            if (tokens[end] in image_tokens, tokens[end] in video_tokens) != kind:
                break
            end += 1
        if image:
            found.append(Stretch(str(end - at), trained=False, image=True, video=video))
        else:
            before = [token for token in tokens[max(0, at - _CONTEXT) : at] if token not in image_tokens]
            text = decode([*before, *tokens[at:end]])[len(decode(before)) :]
            found.append(Stretch(text, bool(trained[at])))
        at = end
    return tuple(found)


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
        facts=_facts(config, source, usable),
        read=len(records),
        sources=_shares(source, len(records)),
        skipped=(*skipped, *undecodable),
        shown=samples,
        warnings=tuple(source.warnings()),
    )


def _facts(config: Config, source: FilesSource, usable: list[EncodedRecord]) -> tuple[tuple[str, str], ...]:
    length = config.train.seq_length
    lengths = [sample.cost.length for record in usable for sample in record.samples]
    sequences = len(bins_of(lengths, seq_length=length, packing=config.data.packing))
    return (
        ("sequences", f"{sequences:,} of {length:,} tokens"),
        ("positions filled", f"{sum(lengths) / max(1, sequences * length):.2%}"),
        ("tokens of a sample", f"{min(lengths, default=0):,} to {max(lengths, default=0):,}"),
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


def _shown(source: FilesSource, usable: list[EncodedRecord], most: int) -> tuple[tuple[Shown, ...], list[Skipped]]:
    """Return at most `most` samples with images, from each data set in turn, and those whose images are broken."""
    by_source: dict[int, list[EncodedRecord]] = {}
    for record in usable:
        by_source.setdefault(_label(source, record)[0], []).append(record)
    found: list[Shown] = []
    bad: list[Skipped] = []
    for record in chain.from_iterable(zip_longest(*by_source.values())):
        if record is not None and len(found) < most:
            try:
                found.extend(_in_full(source, record)[: most - len(found)])
            except BadSample as error:
                assert record.sample_id is not None
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
