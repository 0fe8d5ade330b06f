"""Collate samples into a micro-batch: its text, and the images that this rank encodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megavlm.arch.image_tokens import Grid, features_of, tokens_per_image
from megavlm.arch.objectives import objective_of, pooling_of
from megavlm.config.derived import has_vision
from megavlm.config.schema import AudioConfig, Config, ProjectorConfig
from megavlm.data.tokenizers import NO_IMAGE
from megavlm.data.types import NEGATIVE, POSITIVE, QUERY, WITHOUT_VISION, Row, Sample
from megavlm.errors import UserError
from megavlm.inputs.batch import ImageBatch, ImageSizes, Mask, MicroBatch, SoundBatch, TextBatch
from megavlm.inputs.sounds import in_turn

if TYPE_CHECKING:
    from megavlm.data.source import Source


# A run of features: a grid of patches, the time positions at which the grid occurs, and `pieces` and `shares_marks` of
# a `Film`.
Run = tuple[Grid, tuple[int, ...], tuple[int, ...], bool]
Crop = tuple[int, int, int, int]  # token range [start, end) of a picture's features, and their rows and columns


@dataclass(frozen=True)
class CollateSpec:
    """Properties of a model and its data that determine the shape and contents of a micro-batch."""

    seq_length: int
    image_token: int
    pad_token: int
    projector: ProjectorConfig  # determines the number of image tokens of an image
    patch_dim: int  # values of a patch: channels × patch side²
    audio_token: int | None = None  # token of a sound's features, each of which has a position as text has
    audio: AudioConfig = field(default_factory=AudioConfig)
    video_token: int | None = None  # token of a video's features, if it differs from the image token
    channels: int = 3
    frames_per_patch: int = 1  # of a video; a patch of an image always has one
    mrope: bool = False  # three rotary positions per token
    canvas_tokens: tuple[int, ...] = ()  # marker tokens around slices; if set, M-RoPE uses positions on a canvas
    num_sources: int = 0  # data sets whose losses are reported separately
    # Pooling of a text: the `last` token or the `mean` for an embedding, `answer` for the log-probability of an answer,
    # `score` for that of a reward head.
    pooling: str | None = None
    dtype: torch.dtype = torch.float32  # of patches: the model's, to which its first layer would cast them
    counted: str = "tokens"  # the unit over which the loss is averaged (`Objective.counted`)

    @classmethod
    def of(cls, config: Config, source: Source, *, seq_length: int | None = None) -> CollateSpec:
        """Return the specification of a run, with the tokens of `source` and the model of `config`.

        `seq_length` defaults to the configuration's.
        """
        model, objective = config.model, objective_of(config.model)
        return cls(
            seq_length=seq_length or config.train.seq_length,
            image_token=source.image_token if has_vision(model) else NO_IMAGE,
            pad_token=source.pad_token,
            projector=model.projector,
            patch_dim=model.vision.in_channels * model.vision.patch_size**2,
            audio_token=model.audio_token,
            audio=model.audio,
            video_token=model.video_token,
            channels=model.vision.in_channels,
            frames_per_patch=model.vision.temporal_patch_size,
            mrope=bool(model.language.mrope_section),
            canvas_tokens=model.canvas_tokens,
            num_sources=len(source.names),
            pooling=pooling_of(model),
            counted=objective.counted,
        )

    def __post_init__(self) -> None:
        assert self.image_token != self.pad_token, "padding would be taken for image features"

    def are_features(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the tokens that are replaced by features of images and videos."""
        return np.isin(tokens, [token for token in self.feature_tokens if token != self.audio_token])

    @property
    def feature_tokens(self) -> tuple[int, ...]:
        """Return the tokens that features replace, also those of sounds; () for a language model alone."""
        tokens = (self.image_token, self.video_token, self.audio_token)
        return () if self.image_token == NO_IMAGE else tuple(token for token in tokens if token is not None)


def collate(rows: Sequence[Row], spec: CollateSpec, *, with_patches: bool = True) -> MicroBatch:
    """Return the micro-batch of B rows with all their images, or with `with_patches=False` without pixels.

    Images are in the order of their tokens: row by row, sample by sample.

    Raises UserError if a row is longer than `spec.seq_length`.
    """
    rows = _texts_of(rows)
    samples = [sample for row in rows for sample in row]
    for sample in samples:
        _check_features(sample, spec)
    sizes = _sizes_of(samples)
    text = collate_text(rows, spec)
    images = collate_images(rows, spec) if with_patches else None
    return MicroBatch(text, sizes, images, sounds=collate_sounds(samples, text.tokens, spec))


def collate_sounds(samples: Sequence[Sample], tokens: Tensor, spec: CollateSpec) -> SoundBatch | None:
    """Return the sounds of samples, whose tokens are in `tokens` [B, S]; None without an audio encoder."""
    if spec.audio_token is None:
        return None
    sounds = [sound for sample in samples for sound in sample.sounds]
    positions = torch.nonzero(tokens.flatten() == spec.audio_token)[:, 0]
    mels = torch.cat([torch.empty(0, spec.audio.mel_bins), *(sound.mels() for sound in sounds)])
    return SoundBatch(tuple(sound.frames for sound in sounds), mels, positions, torch.arange(len(positions)))


def collate_images(rows: Sequence[Row], spec: CollateSpec, chosen: Mask | None = None) -> ImageBatch:
    """Return the images of rows as patches, or only the images chosen by the mask [N]; no others are rendered.

    If the patches of a video span several frames, the patches of images repeat their one frame to the same size.
    """
    samples = [sample for row in _texts_of(rows) for sample in row]
    pictures, sizes = [image for sample in samples for image in sample.images], _sizes_of(samples)
    if chosen is not None:  # a picture is a whole image, or one tile of it
        kept = np.repeat(chosen, [len(image.grids) for image in sizes.split()])
        starts = np.cumsum([0, *(len(picture.grids) for picture in pictures)])
        pictures = [picture for picture, start in zip(pictures, starts[:-1], strict=True) if kept[start]]
        sizes = sizes.select(chosen)
    made = [picture.patches() for picture in pictures]
    spans = {patches.shape[1] // spec.patch_dim for patches in made}
    if len(spans) > 1:
        made = [each if each.shape[1] > spec.patch_dim else _repeated(each, spec) for each in made]
    width = made[0].shape[1] if made else spec.patch_dim
    patches = torch.empty(sum(map(len, made)), width, dtype=spec.dtype)
    for place, each in zip(patches.split([len(each) for each in made]), made, strict=True):
        place.copy_(each)
    known = (spec.patch_dim, spec.patch_dim * spec.frames_per_patch)
    assert patches.shape[1] in known, f"patches have {patches.shape[1]} values, the model {spec.patch_dim}"
    return ImageBatch(sizes, patches)


def _repeated(patches: Tensor, spec: CollateSpec) -> Tensor:
    """Return the patches of an image as patches of a still video, with the frame repeated."""
    frames = patches.view(len(patches), spec.channels, 1, -1).expand(-1, -1, spec.frames_per_patch, -1)
    return frames.flatten(1)


def collate_text(rows: Sequence[Row], spec: CollateSpec) -> TextBatch:
    """Return the text of B rows, each padded on the right to `spec.seq_length` positions.

    The samples of a row follow one another; positions restart with each, and `cu_seqlens` separates their attention.
    Position t predicts token t+1: labels are the tokens shifted left by one, and `loss_mask[t]` is 1 where token
    t+1 is trained and of the same sample.
    """
    seq_length, pad_token = spec.seq_length, spec.pad_token
    tokens = np.full((len(rows), seq_length), pad_token, dtype=np.int64)
    loss_mask = np.zeros((len(rows), seq_length), dtype=np.float32)
    positions = np.empty((3 if spec.mrope else 1, len(rows), seq_length), dtype=np.int64)
    sources = np.zeros((len(rows), seq_length), dtype=np.int64)
    bounds, prefixes = [0], []
    for number, row in enumerate(rows):
        end = 0
        for sample in row:
            start, end = end, end + len(sample)
            if end > seq_length:
                raise UserError(
                    f"a sample has {end} tokens but --seq-length is {seq_length}: set --seq-length to at least {end}"
                )
            tokens[number, start:end] = sample.tokens
            loss_mask[number, start : end - 1] = sample.trained[1:]
            sources[number, start:end] = sample.source
            positions[:, number, start:end] = _positions(sample, spec)
            bounds.append(number * seq_length + end)
            prefix = int(sample.trained.argmax()) if sample.trained.any() else len(sample)
            prefixes.append((number * seq_length + start, prefix))
        # Padding continues the positions; in packed rows it is a segment of its own in `cu_seqlens`.
        positions[:, number, end:] = (
            positions[:, number, end - 1 : end].max(initial=-1) + 1 + np.arange(seq_length - end)
        )
        if end < seq_length:
            bounds.append((number + 1) * seq_length)

    labels = np.full_like(tokens, pad_token)
    labels[:, :-1] = tokens[:, 1:]
    packed = any(len(row) > 1 for row in rows)
    return TextBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(loss_mask),
        positions=torch.from_numpy(positions if spec.mrope else positions[0]),
        feature_positions=torch.from_numpy(np.flatnonzero(spec.are_features(tokens))),
        trained_positions=torch.from_numpy(np.flatnonzero(loss_mask) if loss_mask.any() else np.zeros(1, np.int64)),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32) if packed else None,
        lengths=tuple(len(sample) for row in rows for sample in row),
        prefixes=tuple(prefixes),
        row_counts=tuple(
            (sum(map(len, row)), _terms(row, spec) if spec.pooling is not None else int(trained))
            for row, trained in zip(rows, loss_mask.sum(1), strict=True)
        ),
        sources=torch.from_numpy(sources) if spec.num_sources > 1 else None,
        **(_embedded(rows, spec) if spec.pooling is not None else {}),
    )


def _terms(row: Row, spec: CollateSpec) -> int:
    """Return the number of loss terms of a row: queries, answers or positives, depending on `spec.counted`."""
    roles = {"queries": (QUERY,), "answers": (POSITIVE, NEGATIVE)}.get(spec.counted, (POSITIVE,))
    return sum(member.role in roles for text in row for member in text.members)


def _texts_of(rows: Sequence[Row]) -> list[Row]:
    """Return rows in which each text of a record of pairs or of a preference is a separate sample."""
    return [[text for sample in row for text in sample.texts()] for row in rows]


def _embedded(rows: Sequence[Row], spec: CollateSpec) -> dict[str, Tensor]:
    """Return `members`, `pool` and `pool_weights` for rows of texts to embed, or of answers to score.

    For an answer, `pool` has the positions that predict its tokens, each with weight 1; for a score, the last position,
    and `reference` the margins of the answers.
    """
    members: list[tuple[int, int, int, int]] = []
    positions: list[NDArray[np.int64]] = []
    record = -1
    for number, row in enumerate(rows):
        end = number * spec.seq_length
        for text in row:
            start, end = end, end + len(text)
            (member,) = text.members
            record += member.role == (POSITIVE if spec.pooling in ("answer", "score") else QUERY)
            members.append((record, member.role, member.identity, text.source))
            if spec.pooling == "answer":
                positions.append(start + np.flatnonzero(text.trained[1:]))
            else:
                positions.append(np.arange(start if spec.pooling == "mean" else end - 1, end))
    counts = np.array([len(each) for each in positions], dtype=np.int64)
    pool = np.stack([np.concatenate(positions), np.repeat(np.arange(len(counts)), counts)]) if members else ((), ())
    margins = [member.margin for row in rows for text in row for member in text.members]
    return {
        **({"reference": torch.tensor(margins, dtype=torch.float64)} if spec.pooling == "score" else {}),
        "members": torch.tensor(members, dtype=torch.int64).view(-1, 4),
        "pool": torch.as_tensor(pool, dtype=torch.int64),
        "pool_weights": torch.tensor(
            np.ones(counts.sum()) if spec.pooling == "answer" else np.repeat(1 / counts, counts), dtype=torch.float32
        ),
    }


def _check_features(sample: Sample, spec: CollateSpec) -> None:
    """Assert that a sample has one token for each feature of an image or a sound.

    Raises UserError if there are images and the model takes none.
    """
    if sample.images and spec.image_token == NO_IMAGE:
        raise UserError(WITHOUT_VISION)
    features = sum(tokens_per_image(sample.grids, sample.tile_groups, spec.projector))
    tokens = int(spec.are_features(sample.tokens).sum())
    assert tokens == features, f"{tokens} image tokens for {features} image features"
    tokens = int((sample.tokens == spec.audio_token).sum())
    features = sum(features_of(sound.frames, spec.audio) for sound in sample.sounds)
    assert tokens == features, f"{tokens} audio tokens for {features} features of sounds"


def _sizes_of(samples: Sequence[Sample]) -> ImageSizes:
    """Return the sizes of all images of samples, in order."""
    return ImageSizes(
        grids=tuple(grid for sample in samples for grid in sample.grids),
        tile_groups=tuple(group for sample in samples for group in sample.tile_groups),
    )


def _positions(sample: Sample, spec: CollateSpec) -> NDArray[np.int64]:
    """Return the rotary positions of a sample's tokens, [S], or with M-RoPE [3, S]."""
    if not spec.mrope:
        return np.arange(len(sample))
    are_features, merge = spec.are_features(sample.tokens), spec.projector.pixel_shuffle
    if spec.canvas_tokens:
        return canvas_positions(sample.tokens, are_features, sample.grids, marks=spec.canvas_tokens, merge=merge)
    return mrope_positions(are_features, runs_of(sample), merge=merge, timed=spec.audio_token is not None)


def runs_of(sample: Sample) -> list[Run]:
    """Return the runs of contiguous features of a sample, in order.

    An image is one run at one time position, and so is each group of a video's frames if there is text between the
    groups. Otherwise a video is one run with the time positions of its groups.
    """
    return [
        run
        for image in sample.images
        for run in (
            [(image.grids[0], image.film.moments, image.film.pieces, image.film.shares_marks)]
            if image.film is not None and image.film.moments
            else [(grid, (0,), (), False) for grid in image.grids]
        )
    ]


def mrope_positions(are_features: Mask, runs: Sequence[Run], *, merge: int, timed: bool = False) -> NDArray[np.int64]:
    """Return (time, row, column) of each token of one sequence (M-RoPE; Wang et al. 2024, Qwen2-VL): [S] → [3, S].

    Each text token advances all three by one. A still image takes one time position: its feature in row r and column c
    of the merged grid has the position (t, t + r, t + c), where t is the next free position. Text continues at t + the
    image's longer side, the first position that none of its features reached. In a video, a group of frames has the
    time t + its own moment; text after the video continues as after an image, as in Transformers from 5.3 on, or if
    `timed`, as in Qwen2.5-Omni, past its last moment. Features of a sound count as text, and so does padding. If a
    video and its sound take turns, both begin at t; the two marks before them may share a position, and those after.

    Args:
        are_features: [S] mask of the tokens that are features of images and videos.
        runs: runs of features, in order; `merge`² patches make one feature.
    """
    positions = np.empty((3, len(are_features)), dtype=np.int64)
    starts = np.flatnonzero(are_features)
    place = moment = 0
    for grid, moments, pieces, shares_marks in runs:
        rows, columns, shared = grid[0] // merge, grid[1] // merge, int(bool(pieces) and shares_marks)
        first = int(starts[np.searchsorted(starts, place)])
        positions[:, place:first] = np.arange(moment, moment + first - place)
        positions[:, first - shared : first] -= 1
        moment += first - place - shared
        cells = np.indices((len(moments), rows, columns)).reshape(3, -1)
        cells[0] = np.repeat(moments, rows * columns)
        after = int(cells.max()) + 1 if timed else max(rows, columns)
        cells, after = in_turn(cells, pieces) if pieces else (cells, after)
        place = first + cells.shape[1] + shared
        positions[:, first : place - shared] = moment + cells
        moment += after
        positions[:, place - shared : place] = moment
    positions[:, place:] = np.arange(moment, moment + len(are_features) - place)
    return positions


def canvas_positions(
    tokens: NDArray[np.int64],
    are_features: NDArray[np.bool_],
    grids: Sequence[Grid],
    *,
    marks: Sequence[int],
    merge: int,
) -> NDArray[np.int64]:
    """Return (time, row, column) of each token of one sequence (MiniCPM-V 4.7, as in Transformers): [S] → [3, S].

    Each text token advances all three by one. An image is a copy of the whole image, optionally followed by slices,
    with a line break between rows of slices. All features of an image have one time t, the next free position. Their
    rows and columns are positions on a canvas that begins at (t, t) and is as large as the slices together, or as the
    copy if there are no slices. A slice's features are at the slice's place; the copy's are spread over the canvas.
    Marker tokens are at corners: the marker before the image at (t − 1, t − 1), the marker after the copy past the far
    corner, a slice's markers at its first and last feature, and a line break right of its row. Text continues past the
    longer side.

    Args:
        are_features: [S] mask of the tokens that are features of images and videos.
        grids: (rows, columns) in patches of each run of features, in order; `merge`² patches make one feature.
        marks: marker tokens around features; the first is the marker before a slice.
    """
    positions = np.empty((3, len(tokens)), dtype=np.int64)
    place = moment = 0
    for copy, *slices in _images(tokens, are_features, grids, before_slice=marks[0], merge=merge):
        first, behind = max(copy[0] - 1, 0), (slices or [copy])[-1][1]
        while behind < len(tokens) and tokens[behind] in marks:
            behind += 1
        if first > place:
            positions[:, place:first] = np.arange(moment, moment + first - place)
            moment += first - place
        on_canvas = positions[:, first:behind]
        on_canvas[:] = 0
        height, width = _lay_out(on_canvas, copy, slices, first=first)
        on_canvas += moment
        on_canvas[1:, 0] = max(moment - 1, 0)
        moment += max(height, width) + 1
        place = behind
    positions[:, place:] = np.arange(moment, moment + len(tokens) - place)
    return positions


def _images(
    tokens: NDArray[np.int64],
    are_features: NDArray[np.bool_],
    grids: Sequence[Grid],
    *,
    before_slice: int,
    merge: int,
) -> list[list[Crop]]:
    """Return the crops of each image or frame: the copy of the whole image, then its slices."""
    starts, images, taken = np.flatnonzero(are_features), list[list[Crop]](), 0
    for grid in grids:
        rows, columns = grid[0] // merge, grid[1] // merge
        first, taken = int(starts[taken]), taken + rows * columns
        crop = first, first + rows * columns, rows, columns
        if images and tokens[first - 1] == before_slice:
            images[-1].append(crop)
        else:
            images.append([crop])
    return images


def _lay_out(place: NDArray[np.int64], copy: Crop, slices: Sequence[Crop], *, first: int) -> tuple[int, int]:
    """Write the rows and columns of an image's tokens, from token `first` on, to `place` [3, …]; return canvas size."""
    breaks = [number for number, (one, other) in enumerate(pairwise(slices), 1) if other[0] - one[1] > 2]
    across = breaks[0] if breaks and len(slices) % breaks[0] == 0 else len(slices)
    _, _, rows, columns = (slices or [copy])[0]
    height, width = rows * max(len(slices) // max(across, 1), 1), columns * max(across, 1)

    def put(start: int, end: int, row: NDArray[np.int64] | int, column: NDArray[np.int64] | int) -> None:
        place[1, start - first : end - first] = row
        place[2, start - first : end - first] = column

    def spread(crop: Crop, size: tuple[int, int], corner: tuple[int, int]) -> None:
        of_rows, of_columns = (
            torch.linspace(0, length - 1, count).round().long().numpy() + start  # halves round as in the reference
            for length, count, start in zip(size, crop[2:], corner, strict=True)
        )
        put(crop[0], crop[1], of_rows.repeat(crop[3]), np.tile(of_columns, crop[2]))

    put(copy[1], copy[1] + 1, height, width)
    spread(copy, (height, width), (0, 0))
    for number, crop in enumerate(slices):
        row, column = number // across * rows, number % across * columns
        put(crop[0] - 1, crop[0], row, column)
        put(crop[1], crop[1] + 1, row + crop[2] - 1, column + crop[3] - 1)
        spread(crop, (crop[2], crop[3]), (row, column))
    for number in breaks:
        put(slices[number - 1][1] + 1, slices[number][0] - 1, ((number - 1) // across + 1) * rows - 1, across * columns)
    return height, width
