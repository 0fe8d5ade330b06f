"""Micro-batches of samples: rows, canvases of images, positions, and what each rank gets of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

from megavlm.arch.dims import RowSplit
from megavlm.arch.image_tokens import Grid, TileGroup
from megavlm.config.schema import ProjectorConfig
from megavlm.data.broadcast import aligned, copy_to, deserialize, serialize, size_of
from megavlm.data.collate import CollateSpec, Run, canvas_positions, collate, mrope_positions
from megavlm.data.context_parts import followers, order_of, part_of, with_further_tokens
from megavlm.data.synthetic import SyntheticSource
from megavlm.data.tokenizers import NO_IMAGE
from megavlm.data.types import NEGATIVE, POSITIVE, QUERY, Imbalance, Member, Sample, StepData
from megavlm.errors import UserError
from megavlm.families.shared.videos import moments_of
from megavlm.inputs.bad_sample import Skipped
from megavlm.inputs.batch import ImageSizes, LocalFeatures, MicroBatch, SoundBatch, TextBatch
from megavlm.inputs.layout import Film
from megavlm.inputs.patches import Image, LoadedImage
from megavlm.inputs.sounds import Sound
from megavlm.objective.gather import Texts
from tests.support.flags import resolved
from tests.support.micro_batch import micro_batch

IMAGE, PAD, PATCH = 99, 0, 4


def flat(shade: int, *, height: int = PATCH, width: int = PATCH) -> Image:
    """An image of one shade of grey."""
    return Image(
        height=height, width=width, patch_size=PATCH, render=lambda: np.full((height, width, 1), shade, dtype=np.uint8)
    )


def text(tokens: list[int], *, answer: int, images: tuple[Image | LoadedImage, ...] = ()) -> Sample:
    """A sample whose last `answer` tokens are trained."""
    trained = np.arange(len(tokens)) >= len(tokens) - answer
    return Sample(tokens=np.array(tokens, dtype=np.int64), trained=trained, images=images)


def batch(
    samples: list[Sample], *, seq_length: int = 8, pixel_shuffle: int = 1, with_patches: bool = True
) -> MicroBatch:
    """Each sample in a row of its own."""
    rows = [[sample] for sample in samples]
    return packed_batch(rows, seq_length=seq_length, pixel_shuffle=pixel_shuffle, with_patches=with_patches)


def packed_batch(
    rows: list[list[Sample]],
    *,
    seq_length: int = 8,
    pixel_shuffle: int = 1,
    with_patches: bool = True,
    mrope: bool = False,
    image_token: int = IMAGE,
) -> MicroBatch:
    return collate(
        rows,
        CollateSpec(
            seq_length=seq_length,
            image_token=image_token,
            pad_token=PAD,
            projector=ProjectorConfig(pixel_shuffle=pixel_shuffle),
            patch_dim=PATCH**2,
            mrope=mrope,
            num_sources=2,
        ),
        with_patches=with_patches,
    )


def test_a_position_is_trained_where_the_next_token_is_an_answer() -> None:
    given_batch = batch([text([5, 6, 7, 8, 9], answer=2), text([3, 4], answer=1)])
    assert given_batch.text.tokens.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0], [3, 4, 0, 0, 0, 0, 0, 0]]
    assert given_batch.text.labels.tolist() == [[6, 7, 8, 9, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0, 0]]
    assert given_batch.text.loss_mask.tolist() == [[0, 0, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    assert given_batch.text.positions.tolist() == [list(range(8))] * 2
    assert given_batch.text.num_tokens == 7
    assert given_batch.text.loss_mask.dtype == torch.float32


def test_samples_of_a_row_are_kept_apart() -> None:
    first = text([5, IMAGE, 6], answer=2, images=(flat(10),))
    second = replace(text([7, 8], answer=2), source=1)
    given_batch = packed_batch([[first, second], [text([3], answer=0)]], seq_length=6)
    assert given_batch.text.tokens.tolist() == [[5, IMAGE, 6, 7, 8, 0], [3, 0, 0, 0, 0, 0]]
    assert given_batch.text.positions.tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert given_batch.text.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0], [0] * 6], "no sample predicts the next one"
    assert given_batch.text.cu_seqlens.tolist() == [0, 3, 5, 6, 7, 12]
    assert given_batch.text.sources.tolist() == [[0, 0, 0, 1, 1, 0], [0] * 6]
    assert given_batch.text.lengths == (3, 2, 1)
    assert given_batch.text.feature_positions.tolist() == [1]


def test_what_the_host_must_know_stays_there() -> None:
    packed = packed_batch([[text([5, 6], answer=1), text([7], answer=0)], [text([3], answer=0)]], seq_length=6)
    moved = packed.to("meta")
    assert moved.text.tokens.device.type == "meta"
    assert moved.text.cu_seqlens is packed.text.cu_seqlens
    assert moved.text.positions.shape == (2, 6), "rows differ"
    assert batch([text([5, 6], answer=1), text([3, 4], answer=1)]).to("meta").text.positions.shape == (1, 8)


def test_positions_of_three_axes_restart_too() -> None:
    wide = text([5, IMAGE, IMAGE, 6], answer=1, images=(flat(1, width=2 * PATCH),))
    alone = packed_batch([[wide]], seq_length=4, mrope=True).text.positions[:, 0]
    twice = packed_batch([[wide, wide]], mrope=True).text.positions[:, 0]
    assert torch.equal(twice, torch.cat([alone, alone], dim=1))


def test_features_follow_the_images_sample_by_sample() -> None:
    two = text([IMAGE, 5, IMAGE, 6], answer=1, images=(flat(10), flat(20)))
    none = text([7, 8], answer=1)
    wide = text([9, IMAGE, IMAGE], answer=1, images=(flat(30, width=2 * PATCH),))
    given_batch = batch([two, none, wide], seq_length=4)
    assert given_batch.image_sizes.grids == ((1, 1), (1, 1), (1, 2))
    assert given_batch.image_sizes.num_patches == 4
    assert given_batch.text.feature_positions.tolist() == [0, 2, 9, 10]
    shades = ((given_batch.images.patches.mean(dim=1) / 2 + 0.5) * 255).round().int().tolist()
    assert shades == [10, 20, 30, 30]


def test_a_sample_that_is_too_long_names_the_length_it_needs() -> None:
    with pytest.raises(UserError, match="--seq-length is 8: set --seq-length to at least 9"):
        batch([text([1] * 9, answer=1)])


def test_a_language_model_alone_reads_no_images_of_any_source() -> None:
    with pytest.raises(UserError, match=r"a language model alone .* reads no images"):
        packed_batch([[text([IMAGE, 1, 2], answer=1, images=(flat(0),))]], image_token=NO_IMAGE)


@pytest.mark.parametrize(("objective", "terms"), [("contrastive", [3, 1]), ("sigmoid", [2, 1])])
def test_rows_of_texts_count_the_terms_of_their_loss(objective: str, terms: list[int]) -> None:
    """A pair for each positive, or a term for each query, which the balance losses of experts are weighted by."""
    spec = CollateSpec.of(resolved(["--objective", objective, "--seq-length", "16"]), SyntheticSource(resolved([])))
    rows = [[record(POSITIVE, POSITIVE, NEGATIVE), record(POSITIVE)], [record(POSITIVE, NEGATIVE)]]
    found = collate(rows, spec).text
    assert found.row_counts == ((12, terms[0]), (6, terms[1]))
    texts = Texts(found.members)
    assert sum(terms) == len(texts.queries if objective == "sigmoid" else texts.pairs[0])


def record(*documents: int) -> Sample:
    """A record of a query and documents of these roles, each of two tokens."""
    members = tuple(Member(role, number, 2) for number, role in enumerate((QUERY, *documents)))
    return replace(text(np.arange(1, 1 + 2 * len(members)).tolist(), answer=0), members=members)


def test_each_text_of_a_record_has_its_own_images_videos_and_sounds() -> None:
    """Each frame of a video is a group of tiles, where models tile images, and each tile of computed ones an image."""
    video = LoadedImage(((1, 1),) * 3, torch.zeros(3, 16), film=Film((0, 1, 2), (0.0, 1.0, 2.0)))
    frames, image = (TileGroup((0, 0), (4, 4), "frame"),) * 3, TileGroup((1, 2), (4, 8))
    sounds = tuple(Sound(frames, lambda: torch.zeros(8, 4)) for frames in (8, 16))
    both = (Member(POSITIVE, 0, 2, images=4, sounds=1), Member(NEGATIVE, 1, 3, images=1, sounds=1))
    whole = text([1, 2, 3, 4, 5], answer=1, images=(video, *map(flat, range(3)), video))
    texts = replace(whole, members=both, sounds=sounds, tile_groups=(*frames, image, *frames)).texts()
    assert [each.images for each in texts] == [whole.images[:4], (video,)]
    assert [each.tile_groups for each in texts] == [(*frames, image), frames]
    assert [each.sounds for each in texts] == [sounds[:1], sounds[1:]]


FEATURE = 9


def test_an_image_between_words() -> None:
    tokens = np.array([1, 1, *[FEATURE] * 6, 1, 1])
    time, row, column = mrope_positions(tokens == FEATURE, stills((4, 6)), merge=2).tolist()
    assert time == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert row == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    assert column == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]


def test_images_without_words_between_them() -> None:
    tokens = np.array([*[FEATURE] * 4, FEATURE, *[FEATURE] * 2, 1])
    positions = mrope_positions(tokens == FEATURE, stills((2, 2), (1, 1), (2, 1)), merge=1)
    assert positions[0].tolist() == [0, 0, 0, 0, 2, 3, 3, 5]
    assert positions[1].tolist() == [0, 0, 1, 1, 2, 3, 4, 5]
    assert positions[2].tolist() == [0, 1, 0, 1, 2, 3, 3, 5]


Piece = tuple[int, int, int, int]  # words before it, rows and columns of features, groups of frames (0: an image)


@settings(deadline=None, max_examples=25)  # the first example imports Transformers
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 4)), max_size=4),
    st.integers(0, 3),
    st.sampled_from([0.5, 1.0, 0.7, 3.3]),
)
def test_equals_transformers(pieces: list[Piece], words_after: int, seconds: float) -> None:
    """`get_rope_index` of Qwen2.5-VL, which needs a word between two images; a group of frames lasts `seconds`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    config = transformers.Qwen2_5_VLConfig()
    model = transformers.Qwen2_5_VLModel.__new__(transformers.Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = config
    kinds = [t for words, rows, columns, groups in pieces for t in kinds_of(words, rows * columns, groups)]
    kinds += [0] * (words_after + 1)
    step = config.vision_config.tokens_per_second
    expected, _ = model.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.long),
        mm_token_type_ids=torch.tensor(kinds).int()[None],
        image_grid_thw=torch.tensor([(1, 2 * r, 2 * c) for _, r, c, groups in pieces if not groups]),
        video_grid_thw=torch.tensor([(groups, 2 * r, 2 * c) for _, r, c, groups in pieces if groups]),
        second_per_grid_ts=torch.tensor([seconds for *_, groups in pieces if groups]),
    )
    runs = [
        ((2 * rows, 2 * columns), moments_of(groups, seconds, step) if groups else (0,), (), False)
        for _, rows, columns, groups in pieces
    ]
    assert mrope_positions(np.array(kinds) > 0, runs, merge=2).tolist() == expected[:, 0].tolist()


def kinds_of(words: int, features: int, groups: int) -> list[int]:
    return [0] * (words + 1) + ([2] * (features * groups) if groups else [1] * features)


def stills(*grids: tuple[int, int]) -> list[Run]:
    return [(grid, (0,), (), False) for grid in grids]


SLICE, END_OF_SLICE, BEGIN_IMAGE, END_OF_IMAGE, BREAK, PICTURE_TOKEN = range(90, 96)
MARKS = {
    "slice_start_id": SLICE,
    "slice_end_id": END_OF_SLICE,
    "image_start_id": BEGIN_IMAGE,
    "image_end_id": END_OF_IMAGE,
    "newline_id": BREAK,
}
Picture = tuple[Grid, Grid, Grid, int]  # the copy, the arrangement, a slice, how many slices are missing


def written(picture: Picture) -> tuple[list[int], list[Grid]]:
    """The tokens of an image, and its grids in patches."""
    copy, (rows, columns), part, missing = picture
    tokens, grids = [BEGIN_IMAGE, *[PICTURE_TOKEN] * (copy[0] * copy[1]), END_OF_IMAGE], [copy]
    for number in range(rows * columns - missing):
        tokens += [BREAK] * (number > 0 == number % columns)
        tokens += [SLICE, *[PICTURE_TOKEN] * (part[0] * part[1]), END_OF_SLICE]
        grids.append(part)
    return tokens, [(4 * height, 4 * width) for height, width in grids]


@pytest.mark.parametrize(
    "pictures",
    [
        pytest.param([[((2, 3), (0, 0), (0, 0), 0)], [((1, 1), (0, 0), (0, 0), 0)]], id="whole"),
        # Nine columns of three features, and five rows: halves are rounded.
        pytest.param([[((4, 6), (2, 3), (3, 2), 0)], [((3, 4), (1, 2), (2, 5), 0)]], id="sliced"),
        pytest.param(
            [[((2, 2), (3, 1), (2, 3), 0), ((2, 1), (0, 0), (0, 0), 0), ((3, 3), (2, 2), (1, 2), 0)]], id="adjacent"
        ),
        pytest.param([[((2, 2), (2, 3), (2, 2), 1)]], id="a slice is missing"),
    ],
)
@pytest.mark.parametrize("text", [1, 4])
def test_positions_are_those_of_transformers(pictures: list[list[Picture]], text: int) -> None:
    tokens, grids = [7], list[Grid]()
    for neighbours in pictures:
        for picture in neighbours:
            more, sizes = written(picture)
            tokens += more
            grids += sizes
        tokens += range(10, 10 + text)
    ids, kinds = torch.tensor([tokens]), torch.tensor([tokens]).eq(PICTURE_TOKEN).int()
    theirs = SimpleNamespace(
        config=SimpleNamespace(**MARKS, downsample_mode="16x"),
        _group_visual_frames=lambda *given: MiniCPMV4_7Model._group_visual_frames(theirs, *given),
        _frame_end_idx=MiniCPMV4_7Model._frame_end_idx,
        get_vision_position_ids=lambda **given: MiniCPMV4_7Model.get_vision_position_ids(theirs, **given),
    )
    expected, _ = MiniCPMV4_7Model.get_rope_index(theirs, ids, kinds, torch.tensor(grids))
    features = np.array(tokens) == PICTURE_TOKEN
    ours = canvas_positions(np.array(tokens), features, grids, marks=tuple(MARKS.values()), merge=4)
    assert ours.tolist() == expected[:, 0].tolist()


PLACEHOLDER = 7


@st.composite
def batches(draw: st.DrawFn) -> tuple[MicroBatch, RowSplit]:
    """Draw rows with image and trained tokens at random places, and how context-parallel ranks split them."""
    split, rows = RowSplit(draw(st.integers(1, 4)), draw(st.integers(1, 4))), draw(st.integers(1, 3))
    length = split.multiple * draw(st.integers(1, 3))
    size, shape = rows * length, (rows, length)
    flags = st.lists(st.booleans(), min_size=size, max_size=size)
    image, trained = (torch.tensor(draw(flags)).view(shape) for _ in range(2))
    numbers = torch.arange(size).view(shape)
    axes = draw(st.sampled_from(((), (3,))))
    text = TextBatch(
        tokens=torch.where(image, PLACEHOLDER, 100 + numbers),
        labels=200 + numbers,
        loss_mask=trained.float(),
        positions=(300 + numbers).expand(*axes, *shape),
        feature_positions=image.flatten().nonzero()[:, 0],
        trained_positions=trained.flatten().nonzero()[:, 0] if trained.any() else torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, size]),
        sources=400 + numbers,
    )
    return MicroBatch(text, ImageSizes()), split


@settings(max_examples=100, deadline=None)
@given(batches())
def test_the_parts_of_all_ranks_are_the_whole(drawn: tuple[MicroBatch, RowSplit]) -> None:
    batch, split = drawn
    parts = [part_of(batch, split, rank=rank) for rank in range(split.ranks)]
    for name in ("tokens", "labels", "loss_mask", "positions", "sources"):
        whole = torch.cat([getattr(part.text, name) for part in parts], -1)
        order = order_of(split, whole.shape[-1])
        assert torch.equal(whole, getattr(batch.text, name)[..., order])
        assert sorted(order.tolist()) == list(range(len(order)))
    for part in parts:
        assert part.row_tokens is batch.text.tokens
        assert part.text.cu_seqlens is batch.text.cu_seqlens
    # A feature is found again by its label, which is its place in the whole.
    found = torch.cat([part.text.labels.flatten()[part.text.feature_positions] - 200 for part in parts])
    assert sorted(found.tolist()) == batch.text.feature_positions.tolist()


@settings(max_examples=100, deadline=None)
@given(batches())
def test_every_trained_token_has_its_loss_in_one_part(drawn: tuple[MicroBatch, RowSplit]) -> None:
    batch, split = drawn
    losses: list[int] = []
    for rank in range(split.ranks):
        text = part_of(batch, split, rank=rank).text
        places = text.trained_positions
        assert len(places), "an output layer computes at least one loss"
        kept = places[text.loss_mask.flatten()[places] > 0]
        losses += (text.labels.flatten()[kept] - 200).tolist()
    assert sorted(losses) == batch.text.loss_mask.flatten().nonzero()[:, 0].tolist()


def test_features_of_a_colocated_encoder_move_with_their_tokens() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    none = torch.empty(0, dtype=torch.int64)
    text = TextBatch(tokens, tokens, tokens.float(), tokens, feature_positions=torch.tensor([1, 5, 6, 14]))
    batch = MicroBatch(text, ImageSizes(), features=LocalFeatures(torch.tensor([5, 6, 14]), None))
    second = part_of(batch, RowSplit(2), rank=1)
    assert second.features.positions.tolist() == [1, 2, 6] == second.text.feature_positions.tolist()
    first = part_of(replace(batch, features=LocalFeatures(none, None)), RowSplit(2), rank=0)
    assert first.text.feature_positions.tolist() == [1]


def test_the_device_gets_the_part_and_the_tokens_of_whole_rows() -> None:
    tokens = torch.arange(8).view(1, 8)
    text = TextBatch(tokens, tokens, tokens.float(), tokens, feature_positions=torch.tensor([2, 7]))
    batch = part_of(MicroBatch(text, ImageSizes()), RowSplit(2), rank=1)
    moved = batch.with_tensors({name: tensor + 1 for name, tensor in batch.host_tensors().items()})
    assert moved.text.tokens.tolist() == [[5, 6, 7, 8]]
    assert moved.row_tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_groups_that_gather_keys_have_a_run_from_either_end() -> None:
    parts = order_of(RowSplit(heads=2, groups=2), 16).view(4, -1).tolist()
    assert parts == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(1, 3), st.integers(1, 2))
def test_each_position_finds_a_later_one_of_its_row(
    drawn: tuple[MicroBatch, RowSplit], shards: int, steps: int
) -> None:
    batch, split = drawn
    length = batch.text.tokens.shape[1] * shards
    parts = split.ranks * shards
    order = order_of(split, length).view(parts, -1)
    found = followers(split, length, parts=parts, steps=steps)
    arriving = torch.cat([own[sent] for own, sent in zip(order, found.sent, strict=True)])
    for own, rows in zip(order, found.rows, strict=True):
        assert torch.equal(torch.cat([own, arriving])[rows], (own + steps) % length)
    assert found.sent.shape[1] <= 2 * steps, "of two runs at most, and none of another rank's"


def test_a_further_token_has_a_loss_where_it_is_trained_and_of_the_same_sample() -> None:
    """Samples of four and three tokens in the first row, and of five in the second; one token is padding."""
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0]]).float()
    numbers = torch.arange(16).view(2, 8)
    text = TextBatch(
        tokens=numbers,
        labels=100 + numbers,
        loss_mask=mask,
        positions=200 + numbers,
        feature_positions=torch.zeros(0, dtype=torch.int64),
        trained_positions=mask.flatten().nonzero()[:, 0],
        cu_seqlens=torch.tensor([0, 4, 7, 8, 13, 16]),
    )
    further = with_further_tokens(MicroBatch(text, ImageSizes()), 2).text
    assert torch.equal(further.loss_mask[:2], mask)
    one, two = further.loss_mask[2:4], further.loss_mask[4:]
    assert one.tolist() == [[1, 1, 0, 0, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0, 0]]
    assert two.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert further.labels[2:4][one.bool()].tolist() == [101, 102, 105, 109, 111]
    assert torch.equal(further.trained_positions, further.loss_mask.flatten().nonzero()[:, 0])
    assert further.further_positions is not None
    assert further.further_positions[1, 1, :6].tolist() == [210 + place for place in range(6)]


SOUNDS = SoundBatch((9, 4), torch.arange(26.0).view(13, 2), torch.tensor([3, 4, 7]), torch.arange(3))


def step() -> StepData:
    first, second = micro_batch(1, dtype=torch.bfloat16), micro_batch(2)
    odd = replace(
        second.text,
        cu_seqlens=torch.tensor([0, 5, 64], dtype=torch.int32),  # 12 bytes: what follows begins at 64
        feature_positions=torch.empty(0, dtype=torch.int64),
        positions=torch.arange(3 * 2 * 32).view(3, 2, 32),
        sources=torch.ones(2, 32, dtype=torch.int64),
        lengths=(31, 7),
    )
    groups = (TileGroup(grid=(1, 2), size=(30, 40)), TileGroup((0, 0), (30, 40), "last frame"))
    tiled = ImageSizes(((2, 2),) * 4, groups)
    return StepData(
        batches=[replace(first, features=None, sounds=SOUNDS), MicroBatch(odd, tiled)],
        read=9,
        skipped=(Skipped("train.jsonl:18", "träin", "truncated", "Bild – kaputt", partly=True),),
        imbalance=Imbalance(1.5, 1.25, 2.0, 1.75),
    )


def test_a_step_comes_out_as_it_went_in() -> None:
    sent = step()
    description, tensors = serialize(sent)
    memory = torch.full((size_of(tensors),), 255, dtype=torch.uint8)
    copy_to(memory, tensors)
    found = deserialize(description, memory)
    assert (found.read, found.skipped, found.imbalance) == (sent.read, sent.skipped, sent.imbalance)
    for mine, other in zip(found.batches, sent.batches, strict=True):
        assert mine.image_sizes == other.image_sizes
        assert (mine.images is None) == (other.images is None)
        if mine.images is not None and other.images is not None:
            patches, expected = mine.images.patches, other.images.patches
            assert mine.images.sizes == other.images.sizes
            assert patches.is_meta
            assert (patches.shape, patches.dtype) == (expected.shape, expected.dtype)
        for name, value in vars(other.text).items():
            got = getattr(mine.text, name)
            if isinstance(value, torch.Tensor):
                assert got.dtype == value.dtype
                assert got.equal(value), name
                assert got.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr(), "a view, not a copy"
            else:
                assert got == value, name
    sounds = found.batches[0].sounds
    assert sounds is not None
    assert (sounds.frames, sounds.mels.shape) == (SOUNDS.frames, SOUNDS.mels.shape)
    assert sounds.mels.is_meta
    assert sounds.positions.equal(SOUNDS.positions)
    assert sounds.rows.equal(SOUNDS.rows)
    assert not any(each is SOUNDS.mels for each in tensors), "mel features go to those that encode sounds"
    assert b"pickle" not in description
    assert aligned(5) == aligned(64) == 64
