"""Measure what training on preferences changes: a small LLaVA reads digits, and learns which of two answers is meant.

    python benchmarks/preferences.py [--objective kto]

Scans of scikit-learn (those of the demo) are written as files: questions whose answers are right or, half of them,
one too high; and pairs in which the right answer is preferred to that wrong one. The model of `examples/first_run` is
trained on the questions, and from its export on the pairs. Before and after, Transformers alone computes how likely
each of ten answers is for held-out scans, or after `--objective reward`, what score the head gives it. Appended to
`records/preferences.jsonl`: the share of pairs whose right answer is the likelier one, the share of scans whose right
answer is the likeliest of ten, and the processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import record
from PIL import Image

from megavlm.demo.canvases import WORDS, load_scans, split_scans

ROOT = Path(__file__).parents[1]
QUESTION = "Digit?"
SIDE = 56  # of the model's images
HELD_OUT = 200
TRAIN = "--seq-length 256 --global-batch-size 8 --micro-batch-size 4 --lr-warmup-iters 10 --save-interval 0".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objective", default="dpo")
    parser.add_argument("--beta", type=float, help="default: the program's, 2.0 for simpo and else 0.1")
    parser.add_argument("--rpo-alpha", type=float, help="of pairs: weight of the chosen answer's own loss")
    parser.add_argument("--steps", type=int, nargs=2, default=(400, 150), help="of questions, and of preferences")
    arguments = parser.parse_args()
    circumstances = record.circumstances()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held_out = write_data(folder)
        run("examples/first_run/small_model.py", str(folder / "model"))
        first, then = map(str, arguments.steps)
        trained(folder, "model", "questions", ["--train-iters", first, "--lr", "2e-3"])
        flags = ["--objective", arguments.objective]
        for option in ("beta", "rpo_alpha"):
            if (value := getattr(arguments, option)) is not None:
                flags += ["--set", f"model.objective.{option}={value}"]
        trained(folder, "questions", "pairs", [*flags, "--train-iters", then, "--lr", "5e-4"])
        figures = {
            f"{what}_{when}": share
            for when, of in (("before", "questions"), ("after", "pairs"))
            for what, share in shares(folder / of, held_out).items()
        }
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    figures["processor_seconds"] = sum(each.ru_utime + each.ru_stime for each in used)
    print(figures)
    record.append("preferences", {**circumstances, "arguments": vars(arguments), **figures})


def write_data(folder: Path) -> list[tuple[Path, int, int]]:
    """Write the files of both runs; return the held-out scans with their digit and the one above it."""
    scans, chance = load_scans(), np.random.default_rng(1)
    (folder / "images").mkdir()
    training, others = split_scans(scans.labels)
    records: dict[str, list[dict[str, Any]]] = {"questions": [], "pairs": []}
    held_out = []
    for number in (*chance.permutation(training), *chance.permutation(others)[:HELD_OUT]):
        path = folder / f"images/{number}.png"
        grey = np.kron(scans.pixels[number], np.ones((SIDE // 8, SIDE // 8), np.uint8)) * 15
        Image.fromarray(grey).convert("RGB").save(path)
        digit = int(scans.labels[number])
        wrong = (digit + 1) % 10
        if number in others:
            held_out.append((path, digit, wrong))
            continue
        asked = {"image": str(path), "question": QUESTION}
        records["questions"].append({**asked, "answer": WORDS[digit if chance.random() < 0.5 else wrong]})
        records["pairs"].append({**asked, "chosen": WORDS[digit], "rejected": WORDS[wrong]})
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return held_out


def trained(folder: Path, begin: str, data: str, flags: list[str]) -> None:
    """Train on a file from a folder of weights, and export the result to a folder with the name of the file."""
    named = ["--init-from", str(folder / begin), "--datasets", f"{folder / data}.jsonl,image_root={folder}"]
    run("pretrain_vlm.py", *named, *TRAIN, *flags, "--run-dir", str(folder / f"{data}-run"))
    run("-m", "megavlm", "convert", "export", str(folder / f"{data}-run"), str(folder / data))


def run(*words: str) -> None:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def shares(folder: Path, held_out: list[tuple[Path, int, int]]) -> dict[str, float]:
    """Return the share of held-out pairs and of scans whose right answer is the likelier one, by Transformers."""
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForImageTextToText, AutoProcessor

    torch.set_num_threads(1)
    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    said = [{"role": "assistant", "content": [{"type": "text", "text": word}]} for word in WORDS]
    texts = [processor.apply_chat_template([asked, answer]) for answer in said]
    with safe_open(folder / "model.safetensors", "pt") as file:
        head = file.get_tensor("score.weight").float() if "score.weight" in file.keys() else None  # noqa: SIM118
    pairs = answers = 0
    for path, digit, wrong in held_out:
        images = [Image.open(path)] * len(WORDS)
        inputs = processor(images=images, text=texts, add_special_tokens=False, return_tensors="pt", padding=True)
        with torch.no_grad():
            states = model.model(**inputs).last_hidden_state
            logprobs = model.lm_head(states).log_softmax(-1)
        each = logprobs[:, :-1].gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
        # Tokens are bytes, and one for the end; padding is on the left.
        found = torch.stack([each[row, -len(word) - 1 :].sum() for row, word in enumerate(WORDS)])
        if head is not None:
            found = states[:, -1] @ head[0]
        pairs += bool(found[digit] > found[wrong])
        answers += int(found.argmax()) == digit
    return {"pairs_right": pairs / len(held_out), "answers_right": answers / len(held_out)}


if __name__ == "__main__":
    main()
