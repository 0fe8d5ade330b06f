"""Chat templates by name, for tokenizers that have none of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BuiltIn:
    source: str
    needs: tuple[str, ...] = ()  # tokens without which the format makes no sense


# The format of Vicuna 1.1 and LLaVA-1.5: the end mark after each answer.
_VICUNA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }} {% else %}\
A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and \
polite answers to the user's questions. {% endif %}\
{% for message in messages %}\
{% if message.role == 'user' %}USER: {{ message.content }} {% endif %}\
{% if message.role == 'assistant' %}ASSISTANT: {{ message.content }}{{ eos_token }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""

_CHATML = """\
{% for message in messages %}\
{{ '<|im_start|>' + message.role + '\\n' }}{{ message.content }}{{ '<|im_end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_LLAMA3 = """\
{{ bos_token }}{% for message in messages %}\
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}{{ message.content }}<|eot_id|>\
{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_MISTRAL = """\
{{ bos_token }}{% set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}\
{% set first = 1 if system else 0 %}\
{% for message in messages %}\
{% if message.role == 'user' %}[INST] {{ system if loop.index0 == first }}{{ message.content }} [/INST]{% endif %}\
{% if message.role == 'assistant' %}{{ ' ' + message.content }}{{ eos_token }}{% endif %}\
{% endfor %}"""

# The prompt and the answer, nothing around them: captions for a new projector, base models.
_PLAIN = """\
{% for message in messages %}{{ message.content }}\
{% if message.role == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}\
{% endfor %}"""

_SMOLVLM = """\
<|im_start|>{% for message in messages %}\
{{ message.role | capitalize }}{{ ':' if message.content[0].type == 'image' else ': ' }}\
{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}\
{{ '<end_of_utterance>\\n' }}\
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""

BUILT_IN: Mapping[str, BuiltIn] = {
    "vicuna": BuiltIn(_VICUNA),
    "chatml": BuiltIn(_CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": BuiltIn(_LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": BuiltIn(_MISTRAL),
    "plain": BuiltIn(_PLAIN),
    "smolvlm": BuiltIn(_SMOLVLM, ("<end_of_utterance>",)),
}

# What `auto` takes for a model whose folder has no template.
OF_MODEL: Mapping[str, str] = {
    "llava": "vicuna",
    "llava_onevision": "chatml",
    "internvl": "chatml",
    "qwen2": "chatml",
    "qwen3": "chatml",
    "qwen2_5_vl": "chatml",
    "qwen3_vl": "chatml",
    "smolvlm": "smolvlm",
    "idefics3": "smolvlm",
    "mistral": "mistral",
}
