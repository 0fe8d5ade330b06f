"""Write the processor's files of a composed model, so that Transformers alone makes the prompts of its training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megavlm.config.schema import Config
from megavlm.data.chat.probe import image_style, source_of
from megavlm.data.chat.template import ChatTemplate, TemplateError
from megavlm.data.preprocessors import image_settings, model_type, tokenizer_path
from megavlm.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megavlm.errors import UserError
from megavlm.files import replace_file
from megavlm.storage.cache import local_path

_TEMPLATE = "chat_template.jinja"
_IMAGES, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
_OF_OTHERS = ("chat_template.json", "video_preprocessor_config.json")
# Gives a template that takes messages as texts those of messages in parts: what `ChatFormat` makes of them in training.
_IN_PARTS = """\
{%- set flat = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- set said = namespace(text='', image=false) -%}
{%- if message.content is string -%}
{%- set said.text = message.content -%}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{%- set said.text = said.text + IMAGE -%}
{%- else -%}
{%- set said.text = said.text + ('\\n' if said.image and part.text[:1].strip() else '') + part.text -%}
{%- endif -%}
{%- set said.image = part.type == 'image' -%}
{%- endfor -%}
{%- endif -%}
{%- set flat.messages = flat.messages + [dict(message, content=said.text)] -%}
{%- endfor -%}
{%- set messages = flat.messages -%}
"""


def write_processor_files(files: Path, config: Config, processor: Mapping[str, Any], *, image_token: int) -> None:
    """Write to `files` the image processor of the run's tower, `processor_config.json` with what `processor` says, and
    the run's chat template; nothing where the run has no tokenizer or image processor.
    """
    given = config.data.image_processor or config.checkpoint.vision_from
    settings = None if given is None else image_settings(local_path(given, "--image-processor", weights=False))
    try:
        folder = tokenizer_path(config)
        tokenizer = HuggingFaceTokenizer.of(folder, image=image_token)
        source = source_of(tokenizer, config.data.chat_template, model_type(folder))
        template = None if source is None else _for_parts(source, tokenizer)
    except UserError:  # a run of synthetic data needs none
        return
    if settings is None:
        return
    for name in _OF_OTHERS:
        (files / name).unlink(missing_ok=True)
    images = settings.get("image_processor", settings)
    images = {name: value for name, value in images.items() if name != "processor_class"}
    _write(files / _IMAGES, images)
    _write(files / _PROCESSOR, {**processor, "image_token": tokenizer.image_text})
    if template is not None:
        replace_file(files / _TEMPLATE, template)


def _for_parts(source: str, tokenizer: HuggingFaceTokenizer) -> str | None:
    """Return the template for messages in parts, with images as the tokenizer's image token; None for one that no
    conversation can be rendered with.
    """
    try:
        in_parts, written = image_style(
            ChatTemplate(source, tuple(sorted(tokenizer.specials.items()))), tokenizer.image_text, tokenizer.image_text
        )
    except TemplateError:
        return None
    if in_parts and written == tokenizer.image_text:
        return source
    return _IN_PARTS.replace("IMAGE", json.dumps(tokenizer.image_text)) + source


def _write(path: Path, values: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps(values, indent=2, sort_keys=True) + "\n")
