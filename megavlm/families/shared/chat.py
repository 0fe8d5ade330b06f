"""Named chat templates, for tokenizers without a template: the files of `megavlm/families/chat_templates`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "chat_templates"


@dataclass(frozen=True)
class NamedTemplate:
    """A chat template that `--chat-template` selects by name."""

    name: str
    jinja: str
    needs: tuple[str, ...] = ()  # tokens that the tokenizer must have


def template(name: str, needs: str = "") -> NamedTemplate:
    """Return the template of a file; `needs` are the tokens that the tokenizer must have, with spaces between them."""
    return NamedTemplate(name, (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), tuple(needs.split()))


VICUNA = template("vicuna")
CHATML = template("chatml", "<|im_start|> <|im_end|>")
LLAMA3 = template("llama3", "<|start_header_id|> <|end_header_id|> <|eot_id|>")
MISTRAL = template("mistral")
SHARED = (VICUNA, CHATML, LLAMA3, MISTRAL, template("plain"))
