"""Tokenize with the tokenizer of a Hugging Face folder, loaded by `transformers` and run by `tokenizers`."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megavlm.data.tokenizers import MOST_GROWTH, NO_IMAGE, Tokens, growth_of_charsmap, tokens_of
from megavlm.errors import UserError
from megavlm.families import IMAGE_TEXTS
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.json_files import LARGEST, read_json
from megavlm.paths import inside

_READ = (".json", ".jinja", ".model", ".tiktoken", ".txt")  # suffixes of a tokenizer's files
_TRIAL = f"{'a' * 100} {'!' * 100}\n{' ' * 100}x"  # text on which a tokenizer's pattern must not backtrack excessively
_MOST_MARKS = 1000  # special tokens before and after a text
_MOST_TOKENS = 2**24  # largest vocabulary
_INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit)
_CONFIG = "tokenizer_config.json"
_NAMES_OF_FILES = ("_file", "_files", "_spm", "init_inputs")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")  # any of them
_TEMPLATES = ("chat_template.json", "processor_config.json")


@dataclass(eq=False, kw_only=True)
class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face folder, a `TextTokenizer`. `backend` is a `tokenizers.Tokenizer` that adds no
    special tokens.
    """

    backend: Any
    vocab_size: int
    pad: int
    eos: int
    begin: int | None
    image: int
    image_text: str
    specials: Mapping[str, str]
    chat_template: str | None
    image_place: int  # the backend's id of the image token, which differs from `image` if the backend lacks that id

    @classmethod
    def of(cls, folder: Path, *, image: int | None = None, image_text: str = "<image>") -> HuggingFaceTokenizer:
        """Load the tokenizer of a local folder, without running the folder's code or fetching anything.

        Raises UserError if the folder has no tokenizer, if the tokenizer has no end token or no image token, or if the
        libraries are missing.
        """
        try:
            from tokenizers import AddedToken, Tokenizer
            from transformers import AutoTokenizer
        except ImportError as error:
            raise UserError("Hugging Face tokenizers need their libraries: pip install transformers") from error
        _check_is_there(folder)
        with _refusing(folder):
            _check_files(folder)
            loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if getattr(loaded, "backend_tokenizer", None) is None:
            raise UserError(f"the tokenizer in {folder} has no tokenizer.json: save it with Transformers first")
        with _refusing(folder):
            described = loaded.backend_tokenizer.to_str()
            for part in ("normalizer", "pre_tokenizer", "decoder"):
                if (times := _growth(json.loads(described)[part])) > MOST_GROWTH:
                    raise ValueError(f"its {part} makes texts {times:.0f} times as long")
            backend = Tokenizer.from_str(described)  # a copy: it is changed here
            backend.no_padding()
            backend.no_truncation()
            if (marks := backend.num_special_tokens_to_add(False)) > _MOST_MARKS:
                raise ValueError(f"its post_processor adds {marks} tokens to each text")
            plain, added = (backend.encode(_TRIAL, add_special_tokens=each).ids for each in (False, True))
        begin = loaded.bos_token_id if added[0] == loaded.bos_token_id != plain[0] else None
        backend.post_processor = None  # it adds special tokens, and trims spaces off the places of tokens
        if loaded.eos_token_id is None:
            raise UserError(f"the tokenizer in {folder} has no eos_token: name one in tokenizer_config.json")
        text = _image_text(backend, folder, image, image_text)
        if text not in {token.content for token in backend.get_added_tokens_decoder().values()}:
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        place = int(backend.token_to_id(text) or 0)
        target = place if image is None else image
        known = [number for number in backend.get_vocab(with_added_tokens=True).values() if number != place]
        if (vocab_size := max(*known, target) + 1) > _MOST_TOKENS:
            raise UserError(
                f"the tokenizer in {folder} has a token {vocab_size - 1:,}, beyond {_MOST_TOKENS:,}: correct it"
            )
        return cls(
            backend=backend,
            vocab_size=vocab_size,
            pad=loaded.pad_token_id if loaded.pad_token_id is not None else loaded.eos_token_id,
            eos=loaded.eos_token_id,
            begin=begin,
            image=target,
            image_text=text,
            specials={name: str(value) for name, value in loaded.special_tokens_map.items() if isinstance(value, str)},
            chat_template=_template(folder, loaded.chat_template),
            image_place=place,
        )

    def encode(self, text: str) -> Tokens:
        try:
            encoding = self.backend.encode(text, add_special_tokens=False)
        except _INTERRUPTS:
            raise
        except BaseException as error:  # a panic of the library, as for endless backtracking, is not an Exception
            raise BadSample(Reason.CORRUPT, f"the tokenizer cannot read it: {_first_line(error)}") from error
        tokens = tokens_of(encoding.ids, encoding.offsets)
        if self.image_place != self.image:
            tokens.ids[tokens.ids == self.image_place] = self.image
        return tokens

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        places = [self.image_place if token == self.image else int(token) for token in ids]
        return self.backend.decode(places, skip_special_tokens=not special)


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Raise a UserError of one line for any error of the tokenizer libraries within this context."""
    try:
        yield
    except _INTERRUPTS:
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise UserError(
            f"the tokenizer in {folder} cannot be read ({_first_line(error)}): check --tokenizer"
        ) from error


def _growth(step: Any) -> float:
    """Return the factor by which a step of tokenizer.json, or a list of steps in sequence, may lengthen a text."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1
    if charsmap := step.get("precompiled_charsmap"):
        return max(1, growth_of_charsmap(base64.b64decode(charsmap)))
    pattern, inner = step.get("pattern"), [value for value in step.values() if isinstance(value, list)]
    old = pattern.get("String", "") if isinstance(pattern, dict) else ""  # a pattern may match nothing at all
    new = (step.get("content", ""), step.get("prepend", ""))  # of Replace and Prepend
    return max(1, *(len(str(text)) / max(1, len(old)) for text in new)) * math.prod(map(_growth, inner))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _check_is_there(folder: Path) -> None:
    """Raise UserError for a folder without a vocabulary, for which Transformers would make an empty tokenizer."""
    if not any((folder / name).exists() for name in _VOCABULARIES) and not any(folder.glob("*.tiktoken")):
        raise UserError(
            f"{folder} has no {_VOCABULARIES[0]} (nor {', '.join(_VOCABULARIES[1:])}): complete the download, or name "
            "a folder or file that has the model's tokenizer with --tokenizer"
        )


def _check_files(folder: Path) -> None:
    """Raise an error if a file that the libraries read is not regular, leads out of the folder, or is too large."""
    templates = folder / "additional_chat_templates"
    for path in [*sorted(folder.iterdir()), *sorted(templates.glob("*.jinja"))]:
        if path.suffix in _READ and not path.is_dir():
            inside(path.parent, path.name)
            if path.stat().st_size > LARGEST:
                raise ValueError(f"{path.name} has more than {LARGEST} bytes")
    if templates.is_symlink():
        raise ValueError(f"{templates.name} is a link")
    if (folder / _CONFIG).exists():
        _check_names(read_json(folder / _CONFIG), folder)


def _check_names(options: Mapping[str, Any], folder: Path) -> None:
    """Raise an error if tokenizer_config.json names files, which Transformers would open instead of the folder's."""
    for name, value in options.items():
        if isinstance(value, dict):
            _check_names(value, folder)
        elif name == "fast_tokenizer_files" and isinstance(value, list):
            for file in value:
                inside(folder, str(file))
        elif value and name.endswith(_NAMES_OF_FILES) and name != "special_tokens_map_file":  # which nobody opens
            raise ValueError(f"{_CONFIG} names files by {name[:80]!r}, and they lie in the folder: take that out")


def _image_text(backend: Any, folder: Path, image: int | None, given: str) -> str:
    """Return the text of the image token: that of the model's id `image`, else `given`, else a usual name. For NO_IMAGE
    it is `given`, which no text may contain either.

    Raises UserError if there is none, or if the tokenizer has `given` under another id than `image`.
    """
    if image == NO_IMAGE:
        return given
    if image is not None:
        if (own := backend.id_to_token(image)) is not None:
            return str(own)
        if backend.token_to_id(given) is None:  # an unused row of the embedding
            return given
        raise UserError(
            f"--image-token {image} is not in the tokenizer of {folder}, which has {given} as "
            f"{backend.token_to_id(given)}: leave it out, or correct it"
        )
    for text in (given, *IMAGE_TEXTS):
        if backend.token_to_id(text) is not None:
            return text
    raise UserError(
        f"the tokenizer in {folder} has no {given}: name a token that no text uses with --image-token, or add {given}"
    )


def _template(folder: Path, own: Any) -> str | None:
    """Return the folder's chat template: the processor's, which handles images, else the tokenizer's own; or None."""
    for name in _TEMPLATES:
        if (folder / name).exists():
            found = read_json(folder / name).get("chat_template")
            if isinstance(found, str):
                return found
    if isinstance(own, dict):  # several by name
        own = own.get("default")
    return own if isinstance(own, str) else None
