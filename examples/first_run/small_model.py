"""Write a small LLaVA with random weights as a Hugging Face folder: `python small_model.py FOLDER`.

It replaces a published model, so that the first run of README.md needs no download. It has a tiny tower, a tiny Llama,
and a tokenizer of single bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

SIDE, PATCH = 56, 14
SPECIAL = ("<pad>", "<s>", "</s>", "<image>")


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def model(vocabulary: int) -> LlavaForConditionalGeneration:
    """Return a LLaVA of a million random parameters."""
    torch.manual_seed(1)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=PATCH,
        ),
        text_config=LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=SPECIAL.index("<s>"),
            eos_token_id=SPECIAL.index("</s>"),
            pad_token_id=SPECIAL.index("<pad>"),
        ),
        image_token_index=SPECIAL.index("<image>"),
    )
    return LlavaForConditionalGeneration(config)


def main(folder: Path) -> None:
    logging.set_verbosity_error()  # else the next import says that torchvision is missing
    logging.disable_progress_bar()
    from transformers import CLIPImageProcessor

    words = tokenizer()
    size = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size)
    template = (
        "{{ bos_token }}{% for message in messages %}{{ message.role | upper }}: "
        "{% for part in message.content %}{{ '<image>\n' if part.type == 'image' else part.text }}{% endfor %}"
        "{{ eos_token if message.role == 'assistant' else ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
    )
    processor = LlavaProcessor(
        images,
        words,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=template,
        num_additional_image_tokens=1,
    )
    model(len(words)).save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
