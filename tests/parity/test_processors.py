"""Our processors and Transformers' own (PIL backends): the same tiles, the same patches, the same prompts.

The reference runs its image processor on a PIL image and expands its placeholder; ours sees the array and the size.
All bytes are equal before normalisation; what `fast` resizing changes is measured at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.pixtral import image_processing_pil_pixtral as pil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from megavlm.config.schema import ModelConfig
from megavlm.errors import UserError
from megavlm.families import processor_from
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.processor import Processor
from megavlm.inputs.video import Clip
from tests.support.hostile import reason_of
from tests.support.processors import CASES as WHOLE
from tests.support.processors import MODEL_TYPES, bare, model_of, picture

Pixels = NDArray[np.uint8]
Prompt = Callable[[Any, int], str]  # the reference's pixels and an image's index → the text that replaces it


@dataclass(frozen=True)
class Case:
    """`theirs` as a user's folder has it; small tiles keep the tests fast, the arithmetic is that of the real sizes."""

    theirs: Any
    model: ModelConfig
    prompt: Prompt
    model_type: str | None = None  # of a model whose folders name the class of another family

    def ours(self, *, fast: bool = False) -> Processor:
        return processor_from(self.theirs.to_dict(), self.model, fast=fast, model_type=self.model_type)


# What templates write before and after an image.
AROUND = {
    "qwen": ("<|vision_start|>", "<|vision_end|>"),
    "exaone": ("<vision>", "</vision>"),
    "glm": ("<|begin_of_image|>", "<|end_of_image|>"),
    "paddle": ("<|IMAGE_START|>", "<|IMAGE_END|>"),
}


def case(name: str, image_processor: Any = None, model: ModelConfig | None = None, **changes: Any) -> Case:
    """Return a family's case, or one of another image processor and with other attributes of the whole processor."""
    whole = WHOLE[name]
    image_processor = image_processor or whole.image_processor
    theirs = bare(changes.pop("kind", whole.kind), image_processor=image_processor, **{**whole.attributes, **changes})
    around = next((marks for start, marks in AROUND.items() if name.startswith(start)), ("", ""))
    more = {"image_token_divisor": 16} if name.startswith("minicpm") else {}

    def prompt(pixels: Any, index: int) -> str:
        written: str = theirs.replace_image_token(pixels, index, **more)
        return written.join(around)

    return Case(image_processor, model or whole.model, prompt, MODEL_TYPES.get(name))


def onevision(tile: int, patch: int, resolutions: list[list[int]], *, most: int) -> Case:
    image_processor = LlavaOnevisionImageProcessorPil(
        size={"height": tile, "width": tile}, image_grid_pinpoints=resolutions
    )
    changes = {"num_image_tokens": (tile // patch) ** 2, "vision_aspect_ratio": f"anyres_max_{most}"}
    return case("onevision", image_processor, model_of(patch, most=most), **changes)


def internvl(tile: int, patch: int, *, fewest: int, most: int) -> Case:
    image_processor = GotOcr2ImageProcessorPil(
        size={"height": tile, "width": tile}, min_patches=fewest, max_patches=most, crop_to_patches=True
    )
    changes = {"image_seq_length": (tile // patch // 2) ** 2}
    return case("internvl", image_processor, model_of(patch, merge=2), **changes)


def idefics(image_processor: Any, *, kind: type = Idefics3Processor, patch: int = 8) -> Case:
    tile = image_processor.max_image_size["longest_edge"]
    changes = {"image_seq_len": (tile // patch // 2) ** 2, "global_image_tag": "<global-img>", "kind": kind}
    return case("smolvlm", image_processor, model_of(patch, merge=2), **changes)


def sides_of(height: int, width: int) -> dict[str, int]:
    return {"height": height, "width": width}


WITHOUT_CLASS = {"num_additional_image_tokens": 0, "vision_feature_select_strategy": "full"}
SMALL_SPLIT: dict[str, Any] = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
FAMILIES = [name for name in WHOLE if name not in ("llava-next", "minicpmv-4.7")]
CASES: dict[str, Case] = {
    **{name: case(name) for name in FAMILIES},
    "clip-336": case("llava", CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size=sides_of(336, 336))),
    "clip-odd": case("llava", CLIPImageProcessorPil(size={"shortest_edge": 57}, crop_size=sides_of(70, 42))),
    "llava-square": case("llava", LlavaImageProcessorPil(do_pad=True)),
    "siglip": case("llava", SiglipImageProcessorPil(size=sides_of(224, 196)), **WITHOUT_CLASS),
    "onevision-384": onevision(384, 14, LlavaOnevisionImageProcessorPil.image_grid_pinpoints, most=9),
    "onevision-uneven": onevision(30, 7, [[30, 60], [60, 30], [60, 60], [30, 120]], most=2),
    "internvl-448": internvl(448, 14, fewest=1, most=12),
    "internvl-few": internvl(28, 7, fewest=2, most=6),
    "qwen2.5-old": case("qwen2.5-vl", Qwen2VLImageProcessorPil(patch_size=14, min_pixels=3136, max_pixels=200704)),
    "qwen3": case(
        "qwen3-vl",
        Qwen2VLImageProcessorPil(
            **{"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
            **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        ),
    ),
    "deepseek-odd": case(
        "deepseek-vl", DeepseekVLImageProcessorPil(size=sides_of(29, 29), min_size=5), model_of(7), num_image_tokens=16
    ),
    "glm4v-odd": case(
        "glm4v", Glm4vImageProcessorPil(size={"shortest_edge": 2 * 3137 + 1, "longest_edge": 2 * 60 * 28**2 + 1})
    ),
    "pixtral": case(
        *("mistral3", pil.PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size=4), model_of(4)),
        **{"patch_size": 4, "spatial_merge_size": 1},
    ),
    "minicpmv-448": case("minicpmv-4.6", MiniCPMV4_6ImageProcessorPil(patch_size=14), model_of(14, merge=4)),
    "minicpmv-whole": case(
        "minicpmv-4.6",
        MiniCPMV4_6ImageProcessorPil(patch_size=4, scale_resolution=48, slice_mode=False),
        slice_mode=False,
    ),
    "smolvlm": idefics(SmolVLMImageProcessorPil(**SMALL_SPLIT), kind=SmolVLMProcessor),
    "smolvlm-512": idefics(
        SmolVLMImageProcessorPil(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}),
        **{"kind": SmolVLMProcessor, "patch": 16},
    ),
    "idefics3": idefics(Idefics3ImageProcessorPil(**SMALL_SPLIT)),
    "idefics3-whole": idefics(Idefics3ImageProcessorPil(**SMALL_SPLIT, do_image_splitting=False)),
}
# Their real sizes cost the reference seconds.
LARGE = ("onevision-384", "internvl-448", "smolvlm-512", "minicpmv-448", "qwen3")
SMALL = [name for name in CASES if name not in LARGE]


@pytest.mark.parametrize("name", ["qwen2.5-vl", "paddleocr-vl"])
def test_bounds_as_old_files_have_them(name: str) -> None:
    """Transformers 4.45 wrote them twice, as files of PaddleOCR-VL have them; those beside `size` count."""
    bounds = {"min_pixels": 3136, "max_pixels": 200704}
    old = {**CASES[name].theirs.to_dict(), **bounds, "size": {"min_pixels": 1, "max_pixels": 2}}
    ours: Any = processor_from(old, CASES[name].model, model_type=CASES[name].model_type)
    assert {each: getattr(ours, each) for each in bounds} == bounds
    assert dict(type(CASES[name].theirs)(**old).size) == {"shortest_edge": 3136, "longest_edge": 200704}


SIZES = [  # (height, width): landscape, portrait, square, a tile exactly, one pixel, a line, a wide strip
    (60, 80),
    (97, 53),
    (200, 200),
    (28, 28),
    (1, 1),
    (90, 1),
    (1, 37),
    (19, 190),
]


def reference(case: Case, images: list[Pixels]) -> Any:
    """The images of one sample, through the reference."""
    given = [[Image.fromarray(image) for image in images]]
    info = {"return_row_col_info": True} if "max_image_size" in case.theirs.valid_kwargs.__annotations__ else {}
    flat = given if info or isinstance(case.theirs, LlavaOnevisionImageProcessorPil) else given[0]
    return case.theirs(flat, **info)


def their_patches(case: Case, pixels: Any, index: int, grids: list[tuple[int, int]]) -> list[torch.Tensor]:
    """The reference's pixels of an image as row-major patches, tile by tile. A sample has images of equal size."""
    patch = case.ours().patch_size
    if "image_grid_thw" in pixels:
        ((rows, columns),) = grids
        assert pixels["image_grid_thw"][index].tolist() == [1, rows, columns]
        of_image = torch.from_numpy(pixels["pixel_values"]).split(rows * columns)[index]
        if of_image[0].numel() == 3 * patch * patch or "Muse" in type(case.theirs).__name__:  # row by row
            return [*of_image.flatten(1).split(3 * patch * patch, dim=1)[:1]]
        blocks = of_image.view(rows // 2, columns // 2, 2, 2, 3, 2, patch * patch)  # merge blocks, then two frames
        assert torch.equal(blocks[..., 0, :], blocks[..., 1, :])
        return [blocks[..., 0, :].permute(0, 2, 1, 3, 4, 5).reshape(rows * columns, 3 * patch * patch)]
    if "image_position_ids" in pixels:  # pixels from 0 to 1, their channels last
        of_image = torch.as_tensor(pixels["pixel_values"])[index][: math.prod(grids[0])]
        of_image = of_image if case.model.vision.encoder_free else 2 * of_image - 1
        return [of_image.unflatten(1, (-1, 3)).mT.flatten(1)]
    if "target_sizes" in pixels:
        lengths = torch.as_tensor(np.array(pixels["target_sizes"])).prod(1).tolist()
        side_by_side = torch.as_tensor(np.array(pixels["pixel_values"]))[0].unflatten(2, (-1, patch))
        patches = side_by_side.permute(2, 0, 1, 3).flatten(1).split(lengths)
        return list(patches[index * len(grids) : (index + 1) * len(grids)])
    tiles = np.array(pixels["pixel_values"])
    tiles = tiles.reshape(-1, *tiles.shape[-3:])[index * len(grids) : (index + 1) * len(grids)]
    assert len(tiles) == len(grids)
    unfolded = torch.nn.functional.unfold(torch.from_numpy(tiles), patch, stride=patch)  # [T, 3·p·p, rows·columns]
    return list(unfolded.mT)


def assert_same(case: Case, images: list[Pixels]) -> None:
    ours = case.ours()
    try:
        pixels = reference(case, images)
    except ValueError:  # it shrinks to nothing
        with pytest.raises(BadSample):
            ours.layout(*images[0].shape[:2])
        return
    for index, image in enumerate(images):
        if not case.prompt(pixels, index):  # it has no token
            with pytest.raises(BadSample):
                ours.layout(*image.shape[:2])
            return
        layout = ours.layout(*image.shape[:2], images=len(images))
        assert str(layout.prompt) == case.prompt(pixels, index)
        assert layout.features == str(layout.prompt).count(ours.image_token)
        views = ours.views(image, images=len(images))
        assert [view.shape for view in views] == [(tile.height, tile.width, 3) for tile in layout.tiles]
        theirs = torch.cat(their_patches(case, pixels, index, [tile.grid for tile in layout.tiles]))
        mine = torch.cat(ours.tiles(image, images=len(images)))
        assert mine.shape == (layout.patches, 3 * ours.patch_size**2)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)  # a grey level is 1e-2: bit-equal before


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_tiles_and_prompts(name: str, size: tuple[int, int]) -> None:
    case, image = CASES[name], picture(*size)
    assert_same(case, [image])


@pytest.mark.parametrize(
    ("name", "size"), zip(LARGE, [(300, 431), (431, 300), (90, 61), (500, 610), (173, 210)], strict=True)
)
def test_tiles_of_real_sizes(name: str, size: tuple[int, int]) -> None:
    assert_same(CASES[name], [picture(*size)])


@pytest.mark.slow
@pytest.mark.parametrize("size", [(480, 640), (640, 480), (1080, 1920), (333, 500), (64, 1100), (1100, 64)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_tiles_of_photographs_sizes(name: str, size: tuple[int, int]) -> None:
    assert_same(CASES[name], [picture(*size, seed=1)])


@pytest.mark.parametrize("name", SMALL)
def test_several_images_in_a_sample(name: str) -> None:
    assert_same(CASES[name], [picture(50, 70, seed) for seed in range(3)])


MULTIPLES = [27, 28, 29, 32, 64, 224, 336, 384, 448, 512]
sides = st.one_of(st.integers(1, 60), st.integers(1, 3000), st.sampled_from(MULTIPLES))


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(["onevision-384", "onevision-uneven", "internvl-448", "internvl-few"]),
    height=sides,
    width=sides,
)
def test_tile_counts_of_any_size(name: str, height: int, width: int) -> None:
    """Against the reference's own functions of the size, without pixels."""
    case = CASES[name]
    if "internvl" in name:
        assert len(case.ours().layout(height, width).tiles) == case.theirs.get_number_of_image_patches(height, width)
        return
    tile = case.theirs.size["height"]
    pixels = {"batch_num_images": [1], "image_sizes": [[height, width]], "pixel_values": [[np.empty((3, tile, tile))]]}
    expected = case.prompt(pixels, 0)
    try:
        assert str(case.ours().layout(height, width).prompt) == expected
    except BadSample as refused:  # the reference keeps newlines at most
        assert refused.reason is Reason.TOO_NARROW  # noqa: PT017
        assert expected.count("<image>") - (tile // case.ours().patch_size) ** 2 < 6 * tile


@settings(max_examples=100, deadline=None)
@given(height=sides, width=sides, most=st.integers(1, 10))
def test_slices_of_any_size(height: int, width: int, most: int) -> None:
    """Against the reference's functions of the size."""
    theirs = MiniCPMV4_6ImageProcessorPil(patch_size=14, max_slice_nums=most)
    layout = case("minicpmv-4.6", theirs, model_of(14, merge=4)).ours().layout(height, width)
    grid = theirs.get_sliced_grid((height, width), most, 448)
    sides = [theirs.find_best_resize((height, width), 448, 14, "16x", allow_upscale=grid is None)]
    if grid is not None:
        refined = theirs.get_refine_size((height, width), grid, 448, 14, "16x", allow_upscale=True)
        sides += [(refined[0] // grid[0], refined[1] // grid[1])] * (grid[0] * grid[1])
    assert layout.arrangement == tuple(grid or (0, 0))
    assert [(tile.height, tile.width) for tile in layout.tiles] == sides


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(["qwen2.5-vl", "qwen2.5-old", "qwen3", "paddleocr-vl", "muse"]), height=sides, width=sides)
def test_native_grids_of_any_size(name: str, height: int, width: int) -> None:
    case = CASES[name]
    try:
        expected = case.theirs.get_number_of_image_patches(height, width)
    except ValueError:
        assert reason_of(case.ours().layout, height, width) is Reason.TOO_NARROW
        return
    assert case.ours().layout(height, width).patches == expected


class Sizes(SmolVLMImageProcessorPil):
    """The reference with resizing that only keeps books: which size follows which."""

    def resize(self, image: Any, size: Any, resample: Any = None, **_: Any) -> Any:
        from transformers.models.smolvlm.image_processing_pil_smolvlm import get_resize_output_image_size

        longest = size.longest_edge
        sides = get_resize_output_image_size(image, longest) if longest else (size.height, size.width)
        return np.broadcast_to(np.uint8(0), (3, *sides))


@settings(max_examples=100, deadline=None)
@given(height=sides, width=sides)
def test_splits_of_any_size(height: int, width: int) -> None:
    case = CASES["smolvlm-512"]
    theirs = Sizes(**{key: case.theirs.to_dict()[key] for key in ("size", "max_image_size")})
    image = theirs.resize(np.broadcast_to(np.uint8(0), (3, height, width)), theirs.size)
    image = theirs.resize_for_vision_encoder(image, 512)
    frames, rows, columns = theirs.split_images(image, {"longest_edge": 512})
    layout = case.ours().layout(height, width)
    assert layout.arrangement == (rows, columns)
    assert [(3, tile.height, tile.width) for tile in layout.tiles] == [frame.shape for frame in frames]


def test_an_image_among_others_is_tiled_as_well() -> None:
    options = {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 336}}
    ours = processor_from({**options, "crop_size": {"height": 336, "width": 336}}, model_of(14, most=2**16))
    assert ours.layout(500, 600, images=3) == ours.layout(500, 600)
    assert len(ours.layout(500, 600).tiles) == 5
    with pytest.raises(UserError, match="crop_size"):
        processor_from(options, model_of(14, most=2**16))
    with pytest.raises(UserError, match="do_pan_and_scan"):
        processor_from({"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": True}, model_of(14, merge=4))


@pytest.mark.parametrize("size", [(28, 56), (30, 20), (60, 80), (200, 333), (1000, 15)])
def test_kimi_vl_shrinks_by_patches_and_pads_below_and_at_the_right(size: tuple[int, int]) -> None:
    code = {"AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor"}
    options = {"auto_map": code, "in_token_limit": 60, "pad_input": True, "merge_kernel_size": [2, 2]}
    pixels = picture(*size)
    shown = Image.fromarray(pixels)
    if (count := (size[0] // 14) * (size[1] // 14)) > 60:
        shown = shown.resize((int(size[1] * (60 / count) ** 0.5), int(size[0] * (60 / count) ** 0.5)), Image.BICUBIC)
    expected = Image.new("RGB", (-(-shown.width // 28) * 28, -(-shown.height // 28) * 28))
    expected.paste(shown, (0, 0))
    ours = processor_from(options, model_of(14, merge=2), model_type="kimi_vl")
    assert np.array_equal(ours.views(pixels)[0], np.asarray(expected))
    assert ours.layout(*size).features == expected.width * expected.height // 28**2
    with pytest.raises(UserError, match="pad_input true"):
        processor_from({**options, "pad_input": False}, model_of(14, merge=2))


def test_both_spellings_of_kimis_options() -> None:
    """Published folders nest them, under other names and beside code of their own."""
    nested = {"in_patch_limit": 60, "patch_limit_on_one_side": 15, "merge_kernel_size": 2, "fixed_output_tokens": None}
    code = {"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"}
    kimi = CASES["kimi"]
    assert processor_from({"auto_map": code, "media_proc_cfg": nested}, kimi.model) == kimi.ours()
    with pytest.raises(UserError, match="fixed_output_tokens"):
        processor_from({"auto_map": code, "media_proc_cfg": {**nested, "fixed_output_tokens": 9}}, kimi.model)
    tower = replace(kimi.model.vision, position_embedding="learned_rope2d")
    model, options = replace(kimi.model, vision=tower), {"max_patches": 60, "size": {"max_height": 15, "max_width": 15}}
    nested |= {"in_patch_limit_each_frame": 60, "in_patch_limit": 99, "temporal_merge_kernel_size": 3, "sample_fps": 5}
    published, saved = (
        processor_from({"auto_map": code, "media_proc_cfg": nested}, model, video=video, model_type="kimi_k25").video
        for video in (None, {**options, "temporal_patch_size": 3, "fps": 5})
    )
    assert published == saved
    assert saved is not None
    clip = Clip(100, 130, tuple(number / 10 for number in range(20)), 10.0)
    few = saved.layout(clip, replace(saved.usual, max_tokens=45))  # of 20 features for each chunk
    assert [tile.grid for tile in few.tiles] == [(8, 10, 3), (8, 10, 3)]
    assert few.film is not None
    assert few.film.frames == (0, 3, 6, 10, 13, 16)
    assert few.prompt.texts[1] == "<|media_end|>00:00:01.000<|media_begin|>video<|media_content|>"


def test_what_would_take_gigabytes_is_refused() -> None:
    """The reference would resize a hair to 336 × 33 million pixels before it crops the middle."""
    for name in ("clip-336", "llava-square", "pixtral"):
        assert reason_of(CASES[name].ours().layout, 1, 100_000) is Reason.TOO_NARROW


def test_images_beyond_the_learned_positions_are_refused() -> None:
    gemma = case("gemma4")
    assert max(gemma.ours().layout(64, 64).tiles[0].grid) == 24
    few = replace(gemma, model=replace(gemma.model, vision=replace(gemma.model.vision, axis_positions=23)))
    assert reason_of(few.ours().layout, 64, 64) is Reason.TOO_LARGE


@pytest.mark.parametrize("name", ["clip-336", "onevision-384", "smolvlm-512", "qwen3"])
def test_what_fast_resizing_changes(name: str) -> None:
    """Hardly a value is more than one grey level off, none more than two, or three where resizing follows resizing."""
    exact, fast = CASES[name].ours(), CASES[name].ours(fast=True)
    image = picture(310, 433)
    pairs = list(zip(exact.views(image), fast.views(image), strict=True))
    distance = np.concatenate([np.abs(one.astype(int) - other).ravel() for one, other in pairs])
    assert distance.max() <= (3 if name == "smolvlm-512" else 2)
    assert (distance > 1).mean() < (5e-4 if name == "smolvlm-512" else 5e-5)
    assert (distance > 0).mean() < 0.05
