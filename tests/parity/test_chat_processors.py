"""From images and a conversation to tokens, end to end: ours, and Transformers' whole processors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from megavlm.data.chat import ChatFormat
from megavlm.data.conversation import Conversation, ImageRef, Turn
from megavlm.data.processors import processor_from
from megavlm.data.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.parity.test_chat import EXTRA, QWEN, SMOL, byte_level, llama
from tests.parity.test_processors import bare, picture
from tests.support import chat_templates as templates


@dataclass(frozen=True)
class Whole:
    """A processor as a model's folder makes it. Constructors ask for video processors, which need torchvision: so
    processors are made without, of the same parts."""

    kind: Any
    image_processor: Any
    template: str
    tokenizer: str
    attributes: dict[str, Any]
    config: dict[str, Any]


TILE = {"height": 28, "width": 28}
PINPOINTS = [[28 * rows, 28 * columns] for rows in range(1, 4) for columns in range(1, 4)]
CASES = {
    "llava": Whole(
        transformers.LlavaProcessor,
        LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size=TILE),
        templates.LLAVA,
        "llama",
        {
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
            "image_token": "<image>",
        },
        {"vision_config": {"patch_size": 14, "model_type": "clip_vision_model"}},
    ),
    "onevision": Whole(
        transformers.LlavaOnevisionProcessor,
        LlavaOnevisionImageProcessorPil(size=TILE, image_grid_pinpoints=PINPOINTS),
        templates.ONEVISION,
        "qwen",
        {
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
            "image_token": "<image>",
            "video_token": "<video>",
        },
        {"vision_config": {"patch_size": 14}, "vision_aspect_ratio": "anyres_max_9"},
    ),
    "internvl": Whole(
        transformers.InternVLProcessor,
        GotOcr2ImageProcessorPil(size=TILE, min_patches=1, max_patches=6, crop_to_patches=True),
        templates.INTERNVL,
        "qwen",
        {
            "image_seq_length": 1,
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
            "multimodal_pattern": re.compile("(?P<image><IMG_CONTEXT>)|(?P<video><video>)"),
        },
        {"vision_config": {"patch_size": [14, 14]}, "downsample_ratio": 0.5},
    ),
    "qwen2.5-vl": Whole(
        transformers.Qwen2_5_VLProcessor,
        Qwen2VLImageProcessorPil(patch_size=14, size={"shortest_edge": 4 * 28**2, "longest_edge": 60 * 28**2}),
        templates.QWEN2_5_VL,
        "qwen",
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        {"vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
    ),
    "qwen3-vl": Whole(
        transformers.Qwen3VLProcessor,
        Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 4096, "longest_edge": 65536}),
        templates.QWEN3_VL,
        "qwen",
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        {"vision_config": {"patch_size": 16, "spatial_merge_size": 2}},
    ),
    "smolvlm": Whole(
        transformers.SmolVLMProcessor,
        SmolVLMImageProcessorPil(size={"longest_edge": 96}, max_image_size={"longest_edge": 32}),
        templates.SMOLVLM,
        "smol",
        {
            "image_seq_len": 4,
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "global_image_token": "<global-img>",
            "video_token": "<video>",
            "video_processor": SimpleNamespace(num_frames=1, fps=1),
        },
        {"vision_config": {"patch_size": 8}, "scale_factor": 2},
    ),
}
QUESTION, ANSWER, MORE, LAST = "Which is the largest?", "A cat and a dog.", "How many?", "7, it is blue."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tokenizers_in(tmp_path_factory.mktemp("tokenizers"))


def tokenizers_in(root: Path) -> dict[str, Path]:
    made = {
        "qwen": PreTrainedTokenizerFast(
            tokenizer_object=byte_level((*QWEN, *EXTRA)), eos_token="<|im_end|>", pad_token="<|endoftext|>"
        ),
        "smol": PreTrainedTokenizerFast(
            tokenizer_object=byte_level(SMOL), bos_token="<|im_start|>", eos_token="<end_of_utterance>"
        ),
        "llama": PreTrainedTokenizerFast(tokenizer_object=llama(), bos_token="<s>", eos_token="</s>"),
    }
    for name, tokenizer in made.items():
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in made}


@pytest.mark.parametrize("sizes", [[(60, 90)], [(97, 53), (40, 120)]], ids=["one image", "two"])
@pytest.mark.parametrize("name", CASES)
def test_the_tokens_are_those_of_the_whole_processor(
    name: str, sizes: list[tuple[int, int]], folders: dict[str, Path]
) -> None:
    case = CASES[name]
    images = [Image.fromarray(picture(*size)) for size in sizes]
    loaded = transformers.AutoTokenizer.from_pretrained(folders[case.tokenizer])
    theirs = bare(
        case.kind,
        **case.attributes,
        image_processor=case.image_processor,
        tokenizer=loaded,
        chat_template=case.template,
        image_token_id=loaded.convert_tokens_to_ids(case.attributes["image_token"]),
    )

    def said(role: str, text: str, pictures: list[Image.Image]) -> dict[str, Any]:
        shown = [{"type": "image", "image": image} for image in pictures]
        return {"role": role, "content": [*shown, {"type": "text", "text": text}]}

    messages = [
        said("user", QUESTION, images),
        said("assistant", ANSWER, []),
        said("user", MORE, []),
        said("assistant", LAST, []),
    ]
    found = theirs.apply_chat_template(messages, tokenize=True, return_dict=True)
    expected = found["input_ids"]
    expected = expected[0] if isinstance(expected[0], list) else expected

    ours = processor_from(case.image_processor.to_dict(), case.config)
    tokenizer = HuggingFaceTokenizer.of(folders[case.tokenizer], image_text=ours.image_token)
    tokenizer.chat_template = case.template
    chat = ChatFormat.of(tokenizer, placeholder=ours.placeholder)
    conversation = Conversation(
        (
            Turn("user", (*(ImageRef(b"") for _ in images), f"\n{QUESTION}")),
            Turn("assistant", (ANSWER,)),
            Turn("user", (MORE,)),
            Turn("assistant", (LAST,)),
        )
    )
    prompts = [ours.layout(*size, images=len(sizes)).prompt for size in sizes]
    encoded = chat.encode(conversation, prompts)
    assert encoded.tokens.tolist() == list(expected)
