"""Named chat templates that several families share, for tokenizers without a template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NamedTemplate:
    """A chat template that `--chat-template` selects by name."""

    name: str
    jinja: str
    needs: tuple[str, ...] = ()  # tokens that the tokenizer must have


# The format of Vicuna 1.1 and LLaVA-1.5, with the end-of-sequence token after each answer.
VICUNA = NamedTemplate(
    "vicuna",
    """\
{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }} {% else %}\
A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and \
polite answers to the user's questions. {% endif %}\
{% for message in messages %}\
{% if message.role == 'user' %}USER: {{ message.content }} {% endif %}\
{% if message.role == 'assistant' %}ASSISTANT: {{ message.content }}{{ eos_token }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}""",
)

CHATML = NamedTemplate(
    "chatml",
    """\
{% for message in messages %}\
{{ '<|im_start|>' + message.role + '\\n' }}{{ message.content }}{{ '<|im_end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    needs=("<|im_start|>", "<|im_end|>"),
)

LLAMA3 = NamedTemplate(
    "llama3",
    """\
{{ bos_token }}{% for message in messages %}\
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}{{ message.content }}<|eot_id|>\
{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    needs=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)

MISTRAL = NamedTemplate(
    "mistral",
    """\
{{ bos_token }}{% set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}\
{% set first = 1 if system else 0 %}\
{% for message in messages %}\
{% if message.role == 'user' %}[INST] {{ system if loop.index0 == first }}{{ message.content }} [/INST]{% endif %}\
{% if message.role == 'assistant' %}{{ ' ' + message.content }}{{ eos_token }}{% endif %}\
{% endfor %}""",
)

# The prompt and the answer without further text, for captions that train a new projector, and for base models.
PLAIN = NamedTemplate(
    "plain",
    """\
{% for message in messages %}{{ message.content }}\
{% if message.role == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}\
{% endfor %}""",
)

SHARED = (VICUNA, CHATML, LLAMA3, MISTRAL, PLAIN)
