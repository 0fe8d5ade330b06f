"""Tiny tokenizers that split text as those of Qwen, Llama and SmolVLM do."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "What is in the picture? A cat and a dog. How many digits are there, and which is the largest of them?",
    "USER: ASSISTANT: user assistant system You are a helpful assistant. Yes, it is blue. 3 + 4 = 7",
    "A chat between a curious user and an artificial intelligence assistant.\n\nIt gives answers.\n",
]


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


EXTRA = ("<image>", "<IMG_CONTEXT>", "<img>", "</img>", "<think>", "</think>")


LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>")


GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")


MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
)


GLM = (
    *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|video|>", "<|end_of_video|>"),
)


SMOL = ("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>", "<image>", "<row_1_col_1>")


def byte_level(specials: tuple[str, ...]) -> Tokenizer:
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
