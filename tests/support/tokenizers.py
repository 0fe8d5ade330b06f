"""Tiny tokenizers that split text as those of Qwen, Llama and SmolVLM do, and chat templates of published models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# As the folders of models have them, written after their published formats.
TEMPLATES = {path.stem: path.read_text() for path in sorted(Path(__file__).with_name("chat_templates").glob("*.jinja"))}
TEXTS = [
    "What is in the picture? A cat and a dog. How many digits are there, and which is the largest of them?",
    "USER: ASSISTANT: user assistant system You are a helpful assistant. Yes, it is blue. 3 + 4 = 7",
    "A chat between a curious user and an artificial intelligence assistant.\n\nIt gives answers.\n",
]


SPECIALS = {
    "qwen": "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> "
    "<image> <IMG_CONTEXT> <img> </img> <think> </think> <|video_pad|> <video>",
    "llama3": "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <image>",
    "gemma": "<bos> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image> <image_soft_token> <image>",
    "gemma4": "<pad> <bos> <|turn> <turn|> <|image> <|image|> <image|> <|video|> <image> <|channel> <channel|>",
    "mistral": "<s> </s> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [IMG] [IMG_BREAK] [IMG_END] <image>",
    "glm": "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|begin_of_image|> <|image|> "
    "<|end_of_image|> <|begin_of_video|> <|video|> <|end_of_video|> <image>",
    "deepseek": "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <image_placeholder> <image>",
    "ernie": "<|begin_of_sentence|> </s> <|IMAGE_START|> <|IMAGE_PLACEHOLDER|> <|IMAGE_END|> <image>",
    "exaone": "[PAD] <|system|> <|user|> <|assistant|> <|endofturn|> <vision> </vision> <|image_pad|> <|video_pad|> "
    "<image>",
    "minicpm": "<|endoftext|> <|im_start|> <|im_end|> <|image_pad|> <|video_pad|> <image> </image> <slice> </slice> "
    "<image_id> </image_id> <think> </think>",
    "cohere": "<PAD> <BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> "
    "<|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|> <image> <|START_OF_IMG|> <|END_OF_IMG|> <|IMG_PATCH|> "
    "<|IMG_LINE_BREAK|>",
    "kimi": "[PAD] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|media_begin|> "
    "<|media_content|> <|media_pad|> <|media_end|> <|kimi_k25_video_placeholder|> <think> </think> <image>",
    "muse": "<|begin_of_text|> <|eot|> <|start|> <|message|> <|image_start|> <|image_end|> <|patch|> <|vid_start|> "
    "<|vid_end|> <|vid_frame_separator|> <|video|> <image>",
    "smol": "<|im_start|> <end_of_utterance> <fake_token_around_image> <global-img> <image> <row_1_col_1>",
}
MARKS = {
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<end_of_turn>"},
    "gemma4": {"bos_token": "<bos>", "eos_token": "<turn|>", "pad_token": "<pad>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "glm": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "exaone": {"eos_token": "<|endofturn|>", "pad_token": "[PAD]"},
    "minicpm": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "smol": {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>"},
    "deepseek": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "ernie": {"eos_token": "</s>"},
    "kimi": {"eos_token": "<|im_end|>", "pad_token": "[PAD]"},
    "muse": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>"},
    "cohere": {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>"},
    "llama": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}
GEMMA_IMAGES = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>"}


def tokenizers_in(root: Path) -> dict[str, Path]:
    """Write a folder for each tokenizer, and return them by name."""
    for name, marks in MARKS.items():
        more: dict[str, Any] = {"extra_special_tokens": GEMMA_IMAGES} if name == "gemma" else {}
        made = llama() if name == "llama" else byte_level(SPECIALS[name].split())
        if name in ("llama3", "gemma", "gemma4", "mistral", "deepseek", "cohere"):
            made = with_begin(made, marks["bos_token"])
        PreTrainedTokenizerFast(tokenizer_object=made, **marks, **more).save_pretrained(root / name)
    return {name: root / name for name in MARKS}


def byte_level(specials: Iterable[str]) -> Tokenizer:
    """As Qwen's, Llama 3's and SmolLM's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    return tokenizer


def llama() -> Tokenizer:
    """As Llama's, Vicuna's and Mistral's: spaces are letters, unknown letters are bytes, `<s>` comes first."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # no piece goes from word to word …
    tokenizer.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=600, special_tokens=pieces))
    tokenizer.pre_tokenizer = None  # … though nothing says so in the files
    tokenizer.add_special_tokens([AddedToken("<image>", normalized=False)])
    return with_begin(tokenizer, "<s>")


def with_begin(tokenizer: Tokenizer, token: str) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))]
    )
    return tokenizer
