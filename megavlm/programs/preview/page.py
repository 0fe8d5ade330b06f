"""Show what a run reads first, one packing window of samples, as one HTML page that needs no other file or network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from html import escape
from itertools import chain, groupby, zip_longest

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megavlm.config.option import data_kind
from megavlm.config.schema import Config
from megavlm.data.file_source import FilesSource
from megavlm.data.sampler import bins_of
from megavlm.data.types import EncodedRecord, Picture, Sample, Segment
from megavlm.errors import UserError
from megavlm.html import document, dot, facts, picture, section, table
from megavlm.inputs.bad_sample import BadSample, Skipped
from megavlm.inputs.processor import Processor
from megavlm.rules.defaults import resolve

_MOST_SKIPPED = 5  # examples that are listed for each reason
_SIDE, _FRAME = 2048, 320  # most pixels of the longer side of an image, and of a frame of a video
_CONTEXT = 8  # tokens that are decoded together with those after them
_LEGEND = (
    '<p class="quiet"><mark>Trained</mark> tokens have a loss; the others are context. '
    '<span class="image">image</span> stands for image tokens, <span class="image">video</span> for those of a video.'
    "</p>"
)


def page(config: Config, *, most: int, title: str) -> str:
    """Return the page, in which text from the data is escaped, with at most `most` samples in full.

    Raises UserError if the run has no `--datasets` or they cannot be opened.
    """
    if data_kind(config) != "files":
        raise UserError("there is nothing to preview without --datasets: name your data sets, or a --config that does")
    config = resolve(config)
    source = FilesSource(config)
    records = source.first_window()
    usable = [record for record in records if record.samples]
    samples, undecodable = _samples(source, usable, most)
    skipped = [*chain.from_iterable(record.skipped for record in records), *undecodable]
    about = facts((("samples looked at", f"{len(records):,}"), *_facts(config, source, usable)))
    body = [
        f"<header><h1>{escape(title)}</h1>{about}</header>",
        *(f'<p class="warning">{escape(text)}</p>' for text in source.warnings()),
        '<div class="columns">',
        section("Sources", _sources(source, len(records))),
        section("Skipped", skipped_samples(skipped, len(records))),
        "</div>",
        section("Samples", _LEGEND + "".join(samples)),
    ]
    return document(title, body)


def _facts(config: Config, source: FilesSource, usable: Sequence[EncodedRecord]) -> tuple[tuple[str, str], ...]:
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


def _sources(source: FilesSource, read: int) -> str:
    drawn = Counter(source.order.record(number).source for number in range(read))
    rows = (
        (
            f"{dot(number)}{escape(each.name)}",
            f"{each.records:,}",
            f"{each.share:.1%}",
            f"{drawn[number] / max(read, 1):.1%}",
        )
        for number, each in enumerate(source.data_sets())
    )
    return table(("source", "records", "share", "drawn"), rows, numbers=(1, 2, 3))


def skipped_samples(skipped: Sequence[Skipped], read: int) -> str:
    """Return how many of the samples that were read are left out, with examples of each reason, as HTML."""
    if not skipped:
        return f'<p class="quiet">Nothing: all {read:,} samples can be used.</p>'
    whole = sum(not skip.partly for skip in skipped)
    parts = [f"<p>{whole:,} of {read:,} samples ({whole / max(read, 1):.1%}).</p>"]
    counts = Counter((str(skip.reason), skip.partly) for skip in skipped)
    for (reason, partly), count in counts.most_common():
        examples = [skip for skip in skipped if (str(skip.reason), skip.partly) == (reason, partly)]
        listed = "".join(
            f"<li><b>{escape(skip.label)}</b> {escape(skip.detail)}</li>" for skip in examples[:_MOST_SKIPPED]
        )
        note = " <span>in part</span>" if partly else ""
        parts.append(f"<details><summary><b>{count:,}</b> {escape(reason)}{note}</summary><ul>{listed}</ul></details>")
    return "".join(parts)


def _samples(source: FilesSource, usable: Sequence[EncodedRecord], most: int) -> tuple[list[str], list[Skipped]]:
    """Return at most `most` samples with images, from each data set in turn, and those whose images are broken."""
    by_source: dict[int, list[EncodedRecord]] = {}
    for record in usable:
        assert record.sample_id is not None, "skipped records have no samples"
        by_source.setdefault(source.label(record.sample_id)[0], []).append(record)
    found: list[str] = []
    bad: list[Skipped] = []
    for record in chain.from_iterable(zip_longest(*by_source.values())):
        if record is not None and len(found) < most:
            try:
                found.extend(list(_in_full(source, record))[: most - len(found)])
            except BadSample as error:
                assert record.sample_id is not None
                bad.append(source.skipped(record.sample_id, error))
    return found, bad


def _in_full(source: FilesSource, record: EncodedRecord) -> Iterator[str]:
    """Yield each sample of a record: its images, and its text with the trained tokens marked."""
    assert record.sample_id is not None
    index, label = source.label(record.sample_id)
    samples = [source.load(Segment(record.sample_id, encoded)) for encoded in record.samples]
    for number, sample in enumerate(samples, start=1):
        piece = f", piece {number} of {len(samples)}" if len(samples) > 1 else ""
        nothing = "" if sample.trained.any() else ' <span class="warning">nothing is trained</span>'
        images = "".join(_image(source, sample, image) for image in sample.images)
        text = marked(
            sample.tokens.tolist(),
            sample.trained.tolist(),
            image_tokens=source.feature_tokens,
            video_tokens=set(source.feature_tokens) - {source.image_token},
            decode=source.tokenizer.decode,
        )
        yield (
            f"<article><h3>{dot(index)}{escape(label + piece)} "
            f"<span>{escape(source.names[index])} · {len(sample):,} tokens</span>{nothing}</h3>"
            f'{f"<div class=images>{images}</div>" if images else ""}<div class="text">{text}</div></article>'
        )


def marked(
    tokens: Sequence[int],
    trained: Sequence[bool],
    *,
    image_tokens: Collection[int],
    decode: Callable[[Sequence[int]], str],
    video_tokens: Collection[int] = (),
) -> str:
    """Return a sample's text as HTML: trained text is marked, and image tokens are counted.

    `video_tokens` are those of the image tokens that stand for videos alone. Each stretch is decoded together with the
    tokens before it, because a tokenizer's spaces depend on them.
    """
    kinds = [
        (token in image_tokens, token in video_tokens, learnt) for token, learnt in zip(tokens, trained, strict=True)
    ]
    parts, at = [], 0
    for (image, video, learnt), same in groupby(kinds):
        begin, at = at, at + len(list(same))
        if image:
            parts.append(f'<span class="image">{"video" if video else "image"} × {at - begin}</span>')
            continue
        before = [token for token in tokens[max(0, begin - _CONTEXT) : begin] if token not in image_tokens]
        text = escape(decode([*before, *tokens[begin:at]])[len(decode(before)) :])
        parts.append(f"<mark>{text}</mark>" if learnt else text)
    return "".join(parts)


def _image(source: FilesSource, sample: Sample, image: Picture) -> str:
    """Return the pictures of an image that the vision tower receives, or the frames of a video with their times."""
    if image.film is None:
        pictures = _pictures(source.processor, image, whole_first=bool(sample.tile_groups))
        return f'<div class="tiles">{"".join(picture(pixels, side=_SIDE) for pixels in pictures)}</div>'
    frames = _frames(source.processor, image)
    drawn = (
        f"<figure>{picture(pixels, side=_FRAME)}<figcaption>{second:.2f} s</figcaption></figure>"
        for pixels, second in zip(frames, image.film.seconds, strict=True)
    )
    height, width = frames[0].shape[:2]
    about = f"video: {len(frames):,} frames of {height}×{width} pixels"
    return f'<div class="video"><p class="quiet">{about}</p><div class="film">{"".join(drawn)}</div></div>'


def _pictures(processor: Processor, image: Picture, *, whole_first: bool) -> list[NDArray[np.uint8]]:
    """Return the pixels of an image that the tower receives, as pictures uint8 [height, width, 3].

    A tiled image gives its tiles joined and, if there is one, the tile with the whole image.
    """
    patches = image.patches().split([rows * columns for rows, columns in image.grids])
    pictures = [
        unpatchified(cells, grid, patch=processor.patch_size, mean=processor.mean, std=processor.std)
        for cells, grid in zip(patches, image.grids, strict=True)
    ]
    rows, columns = image.arrangement
    if not rows or rows * columns + 1 != len(pictures):
        return pictures
    whole = pictures.pop(0 if whole_first else -1)
    lines = [np.concatenate(pictures[row * columns : (row + 1) * columns], axis=1) for row in range(rows)]
    return [np.concatenate(lines), whole]


def _frames(processor: Processor, video: Picture) -> list[NDArray[np.uint8]]:
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
    return pictures[: len(video.film.frames)]


def unpatchified(
    patches: Tensor, grid: tuple[int, int], *, patch: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> NDArray[np.uint8]:
    """Return the pixels [height, width, 3] of row-major, normalised patches [rows·columns, 3·p·p]: undo `patchify`."""
    rows, columns = grid
    cells = patches.numpy().reshape(rows, columns, 3, patch, patch).transpose(0, 3, 1, 4, 2)
    values = cells.reshape(rows * patch, columns * patch, 3) * np.array(std) + np.array(mean)
    return np.clip(np.rint(values * 255), 0, 255).astype(np.uint8)
