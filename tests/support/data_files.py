"""Small data sets as users have them: a tokenizer, LLaVA records with images of many sizes, plain text, broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_SENTENCE = "a the cat dog sits runs on under red blue mat tree what is where how many two three animals see"
WORDS = _SENTENCE.split()
TOKENS = ("<pad>", "<unk>", "<s>", "</s>", "<image>", "<|im_start|>", "<|im_end|>")


def write_tokenizer(folder: Path) -> Path:
    """A Hugging Face folder: words are tokens, ChatML is the template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*TOKENS, *WORDS, "user", "assistant", "system", "\n", ".", "?"]
    backend = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Punctuation()]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(TOKENS[4:6]),
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def write_llava(folder: Path, *, samples: int, seed: int = 0, most_words: int = 12) -> Path:
    """LLaVA records: none to two images of several sizes and formats each, one to three exchanges."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(samples):
        names = []
        for place in range(int(rng.choice([0, 1, 1, 2]))):
            height, width = rng.integers(8, 40, 2).tolist()
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            names.append(f"{number}-{place}.{'png' if number % 2 else 'jpg'}")
            Image.fromarray(pixels).save(folder / "images" / names[-1])
        turns = []
        for turn in range(int(rng.integers(1, 4))):
            question = " ".join(rng.choice(WORDS, int(rng.integers(2, most_words)))) + " ?"
            tags = "<image>\n" * len(names) if turn == 0 else ""
            turns.append({"from": "human", "value": tags + question})
            turns.append({"from": "gpt", "value": " ".join(rng.choice(WORDS, int(rng.integers(1, most_words)))) + " ."})
        lines.append(json.dumps({"id": number, "image": names, "conversations": turns}))
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def write_pairs(folder: Path, *, records: int, seed: int = 2, name: str = "pairs.jsonl") -> Path:
    """Records of pairs: texts, an image, several images or both; some documents are the same."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)

    def text() -> str:
        return " ".join(rng.choice(WORDS, int(rng.integers(1, 7))))

    def image() -> str:
        height, width = rng.integers(8, 40, 2).tolist()
        place = f"{seed}-{len(list((folder / 'images').iterdir()))}.png"
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / "images" / place)
        return place

    def content(kind: int) -> Any:
        if kind == 0:
            return text()
        if kind == 1:
            return {"image": image()}
        if kind == 2:
            return {"text": f"<image> {text()} <image>", "images": [image(), image()]}
        return [{"type": "text", "text": text()}, {"type": "image", "image": image()}]

    lines = []
    for number in range(records):
        record = {"query": content(int(rng.integers(0, 4))), "positives": [content(int(rng.integers(0, 4)))]}
        if number % 3 == 0:
            record["positives"].append(text())
            record["negatives"] = [content(0), content(1)]
        if number % 4 < 2:
            record["id"] = number // 8
        lines.append(json.dumps(record))
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def write_preferences(
    folder: Path,
    *,
    records: int,
    seed: int = 3,
    name: str = "preferences.jsonl",
    rated: bool = False,
    most_images: int = 2,
) -> Path:
    """Preferences as TRL, LLaMA-Factory, ms-swift and RLAIF-V write them, of none to two images; or `rated` answers."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)

    def text(most: int = 9) -> str:
        return " ".join(rng.choice(WORDS, int(rng.integers(1, most))))

    lines = []
    for number in range(records):
        names = [f"{seed}-{number}-{place}.png" for place in range(int(rng.integers(0, most_images + 1)))]
        for each in names:
            height, width = rng.integers(8, 40, 2).tolist()
            Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / "images" / each)
        question, good, bad = "<image>" * len(names) + text(), text(), text()
        user, known = {"role": "user", "content": question}, {"role": "assistant", "content": text()}
        answers = [[{"role": "assistant", "content": each}] for each in (good, bad)]
        formats: list[dict[str, Any]] = [
            {"prompt": [user], "chosen": answers[0], "rejected": answers[1]},
            {"chosen": [user, *answers[0]], "rejected": [user, *answers[1]]},
            {
                "conversations": [{"from": "human", "value": question}],
                **{key: {"from": "gpt", "value": each} for key, each in (("chosen", good), ("rejected", bad))},
            },
            {"messages": [user, known, {"role": "user", "content": text()}, *answers[0]], "rejected_response": bad},
            {"question": question, "chosen": good, "rejected": bad},
        ]
        said = [{"from": "human", "value": question}, {"from": "gpt", "value": good}]
        rates = {("label", "kto_tag")[number % 2]: number % 3 > 0}
        ratings: list[dict[str, Any]] = [
            {"prompt": question, "completion": good},
            {"prompt": [user], "completion": answers[0]},
            {"messages": [user, known, {"role": "user", "content": text()}, *answers[0]]},
            {"conversations": said},
            {"instruction": question, "input": text(), "output": good},
        ]
        one = {**ratings[number % 5], **rates} if rated else {**formats[number % 5], "margin": number % 3 / 2}
        lines.append(json.dumps({**one, "images": names}))
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def write_text(folder: Path, *, lines: int, seed: int = 1) -> Path:
    rng = np.random.default_rng(seed)
    path = folder / "book.txt"
    path.write_text("\n".join(" ".join(rng.choice(WORDS, int(rng.integers(3, 30)))) for _ in range(lines)) + "\n")
    return path


def sources_of(folder: Path) -> list[str]:
    """Flags for the data sets that the functions above wrote to a folder."""
    return [
        "--datasets",
        f"{folder / 'train.jsonl'},image_root={folder / 'images'},weight=3",
        str(folder / "book.txt"),
        "--tokenizer",
        str(folder / "tokenizer"),
    ]


def write_all(folder: Path, *, samples: int = 60) -> Path:
    write_tokenizer(folder / "tokenizer")
    write_llava(folder, samples=samples)
    write_text(folder, lines=20)
    return folder


def write_held_out(folder: Path, *, samples: int, lines: int) -> Path:
    """Write all of the above, and other records and text for validation to `folder`/held."""
    write_all(folder)
    held = folder / "held"
    write_llava(held, samples=samples, seed=5).rename(held / "chat.jsonl")
    write_text(held, lines=lines, seed=6)
    return folder


def record(question: str, **fields: Any) -> str:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "a cat ."}]
    return json.dumps({"conversations": turns, **fields})
