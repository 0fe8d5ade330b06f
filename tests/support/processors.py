"""Tiny processors of Transformers, with templates and tokenizers as model folders have them."""

from __future__ import annotations

import ast
import itertools
import math
import re
import sys
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as got_ocr2
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import VideoLlama3ImageProcessorPil

from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.families import processor_from
from megavlm.inputs.processor import Processor
from tests.support.tokenizers import TEMPLATES

Pixels = NDArray[np.uint8]


def model_of(
    patch: int, *, merge: int = 1, most: int | None = None, frames: int = 1, convolution: bool = False
) -> ModelConfig:
    """A model as far as image processors look at it."""
    kind: Any = "convolution" if convolution else "concatenate"
    projector = ProjectorConfig(pixel_shuffle=merge, merge=kind, anyres_max_tiles=most)
    return ModelConfig(vision=VisionConfig(patch_size=patch, temporal_patch_size=frames), projector=projector)


def bare(kind: Any, **attributes: Any) -> Any:
    """A reference processor without tokenizer and video processor: its expansion of an image needs neither."""
    processor = kind.__new__(kind)
    for name, value in attributes.items():
        setattr(processor, name, value)
    return processor


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    """Smooth shapes with noise: neither side of a rounding is favoured."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (-(-height // 6), -(-width // 6), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return np.clip(smooth + rng.integers(-20, 21, smooth.shape), 0, 255).astype(np.uint8)


def pixtral_processor() -> type:
    """Transformers' class; of the module of image processors, which asks for torchvision, it needs a pure function."""
    name = "transformers.models.pixtral.image_processing_pixtral"
    absent = name not in sys.modules
    if absent:
        sys.modules[name] = image_processing_pil_pixtral
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    if absent:
        del sys.modules[name]
    return PixtralProcessor


@dataclass(frozen=True)
class Whole:
    """A processor as a model's folder makes it. Constructors ask for video processors, which need torchvision: so
    processors are made without, of the same parts."""

    kind: Any
    image_processor: Any
    template: str
    tokenizer: str
    attributes: dict[str, Any]
    model: ModelConfig
    options: dict[str, Any] = field(default_factory=dict)  # of the constructor, where there is torchvision
    marks: dict[str, str] = field(default_factory=dict)  # special tokens by which the tokenizer's folder names them


TILE = {"height": 28, "width": 28}


PINPOINTS = [[28 * rows, 28 * columns] for rows in range(1, 4) for columns in range(1, 4)]


CLASS_TOKEN: dict[str, Any] = {
    **{"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    "image_token": "<image>",
}
ANYRES: dict[str, Any] = {
    **{"num_image_tokens": 4, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}
}
AROUND = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}
SLICED = {
    **{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>"},
    **{"image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>"},
    **{"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
}


@cache
def functions_of(file: str) -> dict[str, Any]:
    """Return the functions of a module of Transformers that asks for torchvision."""
    tree = ast.parse((Path(transformers.__file__).with_name("models") / file).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found: dict[str, Any] = {"np": np, "math": math, "lru_cache": lru_cache, "torch": torch, "itertools": itertools}
    exec(compile(tree, file, "exec"), found)
    return found


class Cohere2VisionImageProcessorPil(GotOcr2ImageProcessorPil):
    """Command A Vision's processor without torchvision: GOT-OCR 2's, with the grid that its own function chooses."""

    def crop_image_to_patches(self, *args: Any, **options: Any) -> Any:
        found = functions_of("cohere2_vision/image_processing_cohere2_vision.py")
        with patch.object(got_ocr2, "get_optimal_tiled_canvas", found["get_optimal_tiled_canvas"]):
            return super().crop_image_to_patches(*args, **options)


class Gemma4UnifiedImageProcessorPil(Gemma4ImageProcessorPil):
    """The processor of Gemma 4 12B without torchvision: Gemma 4's, whose patches its own function merges."""

    def _preprocess(self, *args: Any, **options: Any) -> Any:
        merge = functions_of("gemma4_unified/image_processing_gemma4_unified.py")["patches_merge"]
        found = super()._preprocess(*args, **options)
        counts, padded = found["num_soft_tokens_per_image"], (found["pixel_values"], found["image_position_ids"])
        pixels, places = list[Any](), list[Any]()
        for number, count in enumerate(map(int, counts)):
            whole = (torch.as_tensor(each[number][: 9 * count])[None] for each in padded)
            for held, (values,) in zip((pixels, places), merge(*whole, count), strict=True):
                held.append(values)
        found["pixel_values"] = torch.nn.utils.rnn.pad_sequence(pixels, batch_first=True)
        found["image_position_ids"] = torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1)
        return found


class Kimi_K25ImageProcessorPil(PaddleOCRVLImageProcessorPil):
    """Kimi-K2.5's processor without torchvision: PaddleOCR-VL's, with the sizes of its own function, and padding."""

    image_mean = image_std = (0.5, 0.5, 0.5)
    size: ClassVar = {"max_height": 15, "max_width": 15}
    max_patches = 60

    def sizes(self, height: int, width: int) -> tuple[SizeDict, SizeDict]:
        """Return the sizes to which a picture is resized and padded."""
        of_sides = functions_of("kimi_k25/image_processing_kimi_k25.py")["navit_resize"]
        found = of_sides(height, width, self.patch_size, self.merge_size, self.max_patches, self.size["max_height"])
        resized, padded = (SizeDict(height=sides[0], width=sides[1]) for sides in found)
        return resized, padded

    def resize(self, image: Any, size: Any, resample: Any, factor: int, **options: Any) -> Any:
        resized, padded = self.sizes(*image.shape[-2:])
        return self.pad([PilBackend.resize(self, image, resized, resample)], padded)[0]

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "max_patches": self.max_patches}


class MuseGlimmerImageProcessorPil(PaddleOCRVLImageProcessorPil):
    """Muse-Glimmer's processor without torchvision: PaddleOCR-VL's, with the sizes of its own function, and patches of
    two equal frames.
    """

    image_mean = image_std = (0.5, 0.5, 0.5)
    resample, temporal_patch_size, max_image_tokens = Image.Resampling.LANCZOS, 2, 60

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the size to which a picture is resized."""
        found = functions_of("muse_glimmer/image_processing_muse_glimmer.py")["smart_resize"]
        sides: tuple[int, int] = found(height, width, self.patch_size * self.merge_size, self.max_image_tokens)
        return sides

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        return math.prod(self.resized(height, width)) // self.patch_size**2

    def resize(self, image: Any, size: Any, resample: Any, factor: int, **options: Any) -> Any:
        height, width = self.resized(*image.shape[-2:])
        return PilBackend.resize(self, image, SizeDict(height=height, width=width), resample)

    def patchify(self, image: Any, *, temporal_patch_size: int, **sizes: Any) -> Any:
        patches, rows, columns = super().patchify(image, temporal_patch_size=1, **sizes)
        return np.concatenate([patches] * temporal_patch_size, axis=1).reshape(len(patches), -1), rows, columns

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "max_image_tokens": self.max_image_tokens}


MUSE = {
    **{"image_token": "<|patch|>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"},
    **{"video_token": "<|video|>", "video_start_token": "<|vid_start|>", "video_end_token": "<|vid_end|>"},
    "video_sep_token": "<|vid_frame_separator|>",
}
AYA = {
    **{"image_token": "<image>", "start_of_img_token": "<|START_OF_IMG|>", "end_of_img_token": "<|END_OF_IMG|>"},
    **{"img_patch_token": "<|IMG_PATCH|>", "tile_token": "TILE", "tile_global_token": "TILE_GLOBAL"},
}


def minicpm(kind: Any) -> Whole:
    """Pictures of about 48 × 48 pixels, in features of 16; what is larger is cut into up to six."""
    return Whole(
        kind,
        MiniCPMV4_6ImageProcessorPil(scale_resolution=48, patch_size=4, max_slice_nums=6),
        TEMPLATES["minicpmv"],
        "minicpm",
        {**SLICED, "slice_mode": True, "default_use_image_id": True},
        model_of(4, merge=4),
        marks=SLICED,
    )


GEMMA4 = {
    **{"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "boa_token": "<|audio>"},
    **{"audio_token": "<|audio|>", "eoa_token": "<audio|>"},
}


def gemma4(kind: Any, image_processor: Any, model: ModelConfig) -> Whole:
    """Pictures of up to 70 features of 12 × 12 pixels. Whole processors ask for an extractor of sounds, too."""
    attributes = {**GEMMA4, "video_processor": None, "feature_extractor": None}
    options = {"feature_extractor": transformers.SequenceFeatureExtractor(1, 16000, 0.0)}
    return Whole(kind, image_processor, TEMPLATES["gemma4"], "gemma4", attributes, model, options, marks=GEMMA4)


PIXELS = {"shortest_edge": 4 * 28**2, "longest_edge": 60 * 28**2}


def native(
    kind: Any, image_processor: Any, *, template: str = "qwen2_5_vl", tokenizer: str = "qwen", merge: int = 2
) -> Whole:
    """Pictures in their own resolution, as Qwen-VL takes them."""
    marks = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    model = model_of(image_processor.patch_size, merge=merge)
    return Whole(kind, image_processor, TEMPLATES[template], tokenizer, marks, model)


CASES = {
    "llava": Whole(
        transformers.LlavaProcessor,
        LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size=TILE),
        TEMPLATES["llava"],
        "llama",
        CLASS_TOKEN,
        model_of(14),
    ),
    "llava-next": Whole(
        transformers.LlavaNextProcessor,
        LlavaNextImageProcessorPil(size={"shortest_edge": 28}, crop_size=TILE, image_grid_pinpoints=PINPOINTS),
        TEMPLATES["llava"],
        "llama",
        CLASS_TOKEN,
        model_of(14, most=2**16),
    ),
    "onevision": Whole(
        transformers.LlavaOnevisionProcessor,
        LlavaOnevisionImageProcessorPil(size=TILE, image_grid_pinpoints=PINPOINTS),
        TEMPLATES["onevision"],
        "qwen",
        {**ANYRES, "image_token": "<image>", "video_token": "<video>"},
        model_of(14, most=9),
        options=ANYRES,
    ),
    "internvl": Whole(
        transformers.InternVLProcessor,
        GotOcr2ImageProcessorPil(size=TILE, min_patches=1, max_patches=6, crop_to_patches=True),
        TEMPLATES["internvl"],
        "qwen",
        {
            **{"image_seq_length": 1, **AROUND, "image_token": "<IMG_CONTEXT>"},
            "multimodal_pattern": re.compile("(?P<image><IMG_CONTEXT>)|(?P<video><video>)"),
        },
        model_of(14, merge=2),
        options={"image_seq_length": 1},
        marks={**AROUND, "context_image_token": "<IMG_CONTEXT>"},
    ),
    "qianfan": Whole(
        transformers.QianfanOCRProcessor,
        GotOcr2ImageProcessorPil(size=TILE, min_patches=1, max_patches=6, crop_to_patches=True),
        TEMPLATES["internvl"].replace("<IMG_CONTEXT>", "<image>"),
        "qwen",
        {
            **{"image_seq_length": 1, **AROUND, "image_token": "<IMG_CONTEXT>", "video_token": None},
            **{"image_placeholder_token": "<image>", "video_processor": None},
        },
        model_of(14, merge=2),
    ),
    "aya": Whole(
        transformers.AyaVisionProcessor,
        GotOcr2ImageProcessorPil(size=TILE, max_patches=6, crop_to_patches=True),
        TEMPLATES["cohere"],
        "cohere",
        {**AYA, "patch_size": 14, "img_size": 28},
        model_of(7, merge=2),
    ),
    "cohere2-vision": Whole(
        transformers.Cohere2VisionProcessor,
        Cohere2VisionImageProcessorPil(size=TILE, max_patches=12, crop_to_patches=True),
        TEMPLATES["cohere"].replace("<image>", "<|IMG_PATCH|>"),
        "cohere",
        {
            **{"image_token": "<|IMG_PATCH|>", "img_line_break_token": "<|IMG_LINE_BREAK|>", "patch_size": 2},
            **{"boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>"},
        },
        model_of(7, merge=2),
    ),
    "lighton": Whole(
        LightOnOcrProcessor,
        image_processing_pil_pixtral.PixtralImageProcessorPil(size={"longest_edge": 77}, patch_size=7),
        TEMPLATES["internvl"].replace("<IMG_CONTEXT>\\n", "<|image_pad|>"),
        "qwen",
        {"patch_size": 7, "spatial_merge_size": 2, "effective_patch_size": 14, "image_token": "<|image_pad|>"},
        model_of(7, merge=2, convolution=True),
    ),
    "qwen2-vl": native(
        transformers.Qwen2VLProcessor,
        Qwen2VLImageProcessorPil(patch_size=14, min_pixels=3136, max_pixels=60 * 28**2),
    ),
    "qwen2.5-vl": native(transformers.Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil(patch_size=14, size=PIXELS)),
    "qwen3-vl": native(
        transformers.Qwen3VLProcessor,
        Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 4096, "longest_edge": 65536}),
        template="qwen3_vl",
    ),
    "exaone4.5": native(
        transformers.Exaone4_5_Processor,
        Qwen2VLImageProcessorPil(patch_size=14, size=PIXELS),
        template="exaone4_5",
        tokenizer="exaone",
    ),
    "gemma3": Whole(
        transformers.Gemma3Processor,
        Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
        TEMPLATES["gemma3"],
        "gemma",
        {
            "image_seq_length": 4,
            "image_token": "<start_of_image>",
            "boi_token": "<start_of_image>",
            "full_image_sequence": f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n",
        },
        model_of(7, merge=4),
    ),
    "gemma4": gemma4(
        transformers.Gemma4Processor, Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70), model_of(4, merge=3)
    ),
    "gemma4-unified": gemma4(
        transformers.Gemma4UnifiedProcessor,
        Gemma4UnifiedImageProcessorPil(patch_size=4, max_soft_tokens=70),
        ModelConfig(vision=VisionConfig(patch_size=12, encoder_free=True)),
    ),
    "glm4v": Whole(
        transformers.Glm4vProcessor,
        Glm4vImageProcessorPil(size={"shortest_edge": 2 * 3136, "longest_edge": 2 * 60 * 28**2}),
        TEMPLATES["glm4v"],
        "glm",
        {"image_token": "<|image|>", "video_token": "<|video|>", "video_start_id": -1, "video_end_id": -1},
        model_of(14, merge=2, frames=2),
    ),
    "paddleocr-vl": Whole(
        transformers.PaddleOCRVLProcessor,
        PaddleOCRVLImageProcessorPil(size=PIXELS),
        TEMPLATES["paddleocr_vl"],
        "ernie",
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
        model_of(14, merge=2),
        marks={"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    "video-llama-3": native(
        transformers.VideoLlama3Processor,
        VideoLlama3ImageProcessorPil(size={"shortest_edge": 4 * 14**2, "longest_edge": 12 * 14**2}),
        template="video_llama_3",
        merge=1,
    ),
    "kimi": Whole(
        transformers.Kimi_K25Processor,
        Kimi_K25ImageProcessorPil(),
        TEMPLATES["kimi"],
        "kimi",
        {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"},
        model_of(14, merge=2),
    ),
    "muse": Whole(
        transformers.MuseGlimmerProcessor,
        MuseGlimmerImageProcessorPil(),
        TEMPLATES["muse"],
        "muse",
        MUSE,
        model_of(14, merge=2, frames=2),
    ),
    "mistral3": Whole(
        pixtral_processor(),
        image_processing_pil_pixtral.PixtralImageProcessorPil(size={"longest_edge": 84}, patch_size=14),
        TEMPLATES["mistral3"],
        "mistral",
        {
            **{"patch_size": 7, "spatial_merge_size": 2, "image_token": "[IMG]"},
            **{"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        },
        model_of(7, merge=2),
    ),
    "deepseek-vl": Whole(
        transformers.DeepseekVLProcessor,
        DeepseekVLImageProcessorPil(size=TILE),
        TEMPLATES["deepseek_vl"],
        "deepseek",
        {"num_image_tokens": 4, "image_token": "<image_placeholder>"},
        model_of(14),
        options={"num_image_tokens": 4},
        marks={"image_token": "<image_placeholder>"},
    ),
    "minicpmv-4.6": minicpm(transformers.MiniCPMV4_6Processor),
    "minicpmv-4.7": minicpm(transformers.MiniCPMV4_7Processor),
    "smolvlm": Whole(
        transformers.SmolVLMProcessor,
        SmolVLMImageProcessorPil(size={"longest_edge": 96}, max_image_size={"longest_edge": 32}),
        TEMPLATES["smolvlm"],
        "smol",
        {
            "image_seq_len": 4,
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "global_image_token": "<global-img>",
            "video_token": "<video>",
            "video_processor": SimpleNamespace(num_frames=1, fps=1),
        },
        model_of(8, merge=2),
        options={"image_seq_len": 4},
    ),
}
MODEL_TYPES = {"exaone4.5": "exaone4_5", "lighton": "lighton_ocr", "aya": "aya_vision"}


def ours_of(name: str) -> Processor:
    """Return our processor of a case."""
    whole = CASES[name]
    return processor_from(whole.image_processor.to_dict(), whole.model, model_type=MODEL_TYPES.get(name))
