"""What an export of a model that embeds says about pooling: files for programs, and a README for people."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

from megavlm.checkpoint.hf.sentence_files import end_texts, write_sentence_transformers_files
from megavlm.config.schema import ObjectiveConfig
from megavlm.errors import UserError
from megavlm.json_files import read_json

FILE = "megavlm_embedding.json"
_TOLD = ("pooling", "query_prefix", "document_prefix", "matryoshka_widths")

_README = """# Embeddings

These weights turn texts and images into vectors (objective: {kind}). They were exported by megavlm; `megavlm embed` or
`python tools/embed.py` writes vectors of a file of records. With Transformers:

```python
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForImageTextToText.from_pretrained(FOLDER).eval()
text = {query!r} + "what do you look for?"  # a document: {document!r} + its text
inputs = tokenizer(text{end}, return_tensors="pt")
states = model.model(**inputs).last_hidden_state[0]
vector = torch.nn.functional.normalize({pooled}, dim=-1)
```

{sentences}A text is its instruction, its words and the end token; an image stands where the processor of the folder
puts it. The vector is the {pooling}, normalised to length 1. {widths}The language model's output
layer (`lm_head`) is that of the model that training began with, and has no meaning for embeddings.
"""


_SENTENCES = """With sentence-transformers, whose files are here as well:

```python
import PIL.Image
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(FOLDER)
vectors = model.encode_query(["what do you look for?"])  # or model.encode_document
picture = PIL.Image.open("a.png")  # beside images the instruction is to be written, and their places
vectors = model.encode([{{"image": picture, "text": {document!r} + "<image> and words"}}])
```

"""


def write_embedding_files(folder: Path, options: ObjectiveConfig, *, width: int) -> None:
    """Write what says how an export's model embeds, with vectors of `width` channels.

    `tokenizer.json` gets the end token, which the vector may be the state of, as what it adds to each text.
    """
    told = {"objective": options.kind, "normalized": True, **{name: getattr(options, name) for name in _TOLD}}
    (folder / FILE).write_text(json.dumps(told, indent=2) + "\n")
    ends = end_texts(folder)
    if ends:
        write_sentence_transformers_files(folder, options, width=width)
    last = options.pooling == "last"
    listed = ", ".join(map(str, options.matryoshka_widths))
    widths = f"The first {listed} channels alone are vectors, too, once they are normalised. " if listed else ""
    readme = _README.format(
        kind=options.kind,
        query=options.query_prefix,
        document=options.document_prefix,
        end="" if ends else " + tokenizer.eos_token",
        sentences=_SENTENCES.format(document=options.document_prefix) if ends else "",
        pooled="states[-1]" if last else "states.mean(0)",
        pooling="state of the end token" if last else "mean over the states of all tokens",
        widths=widths,
    )
    (folder / "README.md").write_text(readme)


def read_embedding_file(folder: Path) -> ObjectiveConfig:
    """Return how a folder's model embeds. Raises UserError if it does not say so, or says what cannot be."""
    if not (folder / FILE).is_file():
        raise UserError(f"{folder} has no {FILE}: it is no export of a model that was trained to embed (--objective)")
    found = read_json(folder / FILE)
    kinds = get_args(get_type_hints(ObjectiveConfig)["kind"])
    if found.get("objective") not in kinds or found.get("pooling") not in ("last", "mean"):
        raise UserError(f"{folder / FILE} names no objective or pooling that megavlm knows")
    values: dict[str, Any] = {name: found.get(name, getattr(ObjectiveConfig(), name)) for name in _TOLD}
    if not all(isinstance(values[name], str) for name in _TOLD[:3]):
        raise UserError(f"{folder / FILE} has an instruction that is no text")
    values["matryoshka_widths"] = tuple(width for width in values["matryoshka_widths"] if isinstance(width, int))
    return replace(ObjectiveConfig(kind=cast(Any, found["objective"])), **values)
