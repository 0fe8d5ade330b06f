"""The commands that the documents print, and a folder in which they run: what they name is there, in miniature."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("python", "torchrun", "megavlm", "sbatch", "srun", "make", "while", "tools/gpu_check.sh")

# Commands that no test runs from here, by their beginning, and why.
ELSEWHERE = {
    "make ": "the Makefile's targets are this suite and the demo",
    "srun ": "tests/dist/test_cluster.py runs it on a cluster of its own",
    "sbatch ": "tests/dist/test_cluster.py runs it on a cluster of its own",
    "megavlm launch slurm ": "tests/dist/test_cluster.py runs it on a cluster of its own",
    "python -m megavlm.programs.launch.node ": "a container of a job; the tests of launchers run it as such",
    "megavlm launch vertex ": "tests/unit/programs/launch has what it would submit",
    "megavlm launch kubernetes ": "tests/unit/programs/launch has what it would submit",
    "megavlm sweep lr.yaml ": "a grid of hours; tests/unit/programs/test_grid.py has small ones",
    "while ": "a shell loop around any command",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:4 ": "it waits for machines",
    "torchrun --nnodes 16 ": "it waits for machines; tests/dist/test_doctor_world.py has two",
    "tools/gpu_check.sh": "it needs a GPU",
    "python -m pytest ": "the suite has them",
    "python benchmarks/": "hours",
    "torchrun --nproc-per-node 8 pretrain_vlm.py --init-from MODEL --objective ": "tests/dist/test_embed.py has pairs",
    "megavlm compare ": "tests/parity/test_hf_parts.py compares a run and its export",
    "megavlm embed ": "tests/dist/test_embed.py embeds records",
    "megavlm logprobs ": "tests/dist/test_logprobs.py scores records",
    "torchrun --nproc-per-node 4 pretrain_vlm.py --extension ": "tests/dist/test_extensions.py trains with extensions",
    "torchrun --nproc-per-node 8 pretrain_vlm.py --init-from Qwen3-VL-30B": "tests/dist/test_hf.py trains mixtures",
    "torchrun --nproc-per-node 8 pretrain_vlm.py --init-from Qwen3.5-9B": "tests/dist/test_hf.py trains hybrids",
    "torchrun --nproc-per-node 8 pretrain_vlm.py --config recipes/": "tests/bench/test_recipes.py has the real models",
    "torchrun --nproc-per-node 8 pretrain_vlm.py --config run.yaml --run-dir /nvme/": "it needs a store",
    "megavlm channels arrays.jsonl ": "tests/dist/test_channels.py measures, and trains on, arrays",
    "torchrun --nproc-per-node 8 pretrain_vlm.py --init-from MODEL --datasets arrays.jsonl ": "as the line above",
    "megavlm convert export runs/qformer ": "tests/dist/test_compose.py exports a run in parts",
    "torchrun --nproc-per-node 4 pretrain_vlm.py --vision-from exported/vision ": "and begins another run with them",
    "python examples/first_run/ask.py": "tests/dist/test_after_training.py asks it, after the whole run",
    "python examples/acme_vlm/small_model.py": "tests/dist/test_extensions.py makes a folder with it",
    "megavlm convert export runs/acme ": "tests/dist/test_extensions.py exports a folder of that family",
    "python -m lmms_eval ": "tests/dist/test_after_training.py runs it where lmms-eval is",
    "python examples/first_hour/make_data.py": "the folder has what it writes",
}


@dataclass(frozen=True)
class Example:
    page: str
    words: tuple[str, ...]  # with the values of variables that stand before the program

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def elsewhere(self) -> bool:
        return any(self.text.startswith(start) for start in ELSEWHERE)

    @property
    def world(self) -> int:
        """Return how many processes it starts."""
        if self.words[0] != "torchrun":
            return 1
        return int(self.words[self.words.index("--nproc-per-node") + 1])

    @property
    def command(self) -> tuple[str, tuple[str, ...]]:
        """Return the command of `megavlm` that it runs, and the words after that."""
        for place, word in enumerate(self.words):
            if word == "pretrain_vlm.py":
                return "train", self.words[place + 1 :]
            if word == "megavlm":
                return self.words[place + 1], self.words[place + 2 :]
            if word == "megavlm.programs.launch":
                return "launch", self.words[place + 1 :]
        raise AssertionError(f"{self.page}: no program is known in {self.text}")


def examples(page: Path) -> Iterator[Example]:
    """Yield the commands in the code blocks of a page, in order; what follows a # is left out."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```|((?:^    [^\n]*\n)+)", text, flags=re.MULTILINE | re.DOTALL)
    for fenced, indented in blocks:
        for line in (fenced or indented).replace("\\\n", " ").splitlines():
            if next((word for word in line.split() if "=" not in word), "") in PROGRAMS:
                yield Example(page.name, tuple(shlex.split(line, comments=True)))


def environment(folder: Path, python: Path = Path(sys.executable)) -> dict[str, str]:
    """Return the variables of a shell in a copy of the clone, where `megavlm` is the command of these sources."""
    command = folder / ".commands/megavlm"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec "{python}" -m megavlm "$@"\n')
    command.chmod(0o755)
    paths = os.pathsep.join([str(command.parent), str(python.parent), os.environ["PATH"]])
    return {**os.environ, "PATH": paths, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def write_folder(folder: Path) -> None:
    """Write what the examples name: programs, data, models, configurations."""
    import pyarrow
    import transformers
    from pyarrow import parquet

    from examples.first_hour import make_data
    from examples.first_run import small_model
    from tests.support.tiny_models import TEXT, TOWER

    for name in ("pretrain_vlm.py", "megavlm", "launch", "examples", "benchmarks", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    records = [json.loads(line) for line in (ROOT / "examples/first_run/train.jsonl").read_text().splitlines()]
    shutil.copytree(ROOT / "examples/first_run/images", folder / "images")
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records * 4))
    inside = [{**record, "image": Path(record["image"]).name} for record in records]
    (folder / "llava_665k.json").write_text(json.dumps(inside * 4))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "scans").symlink_to(folder / "images")
    parquet.write_table(pyarrow.Table.from_pylist(inside), folder / "docvqa.parquet")
    make_data.main(folder / "my-data", images=120)
    small_model.main(folder / "HF_DIR")
    _write_qwen(folder / "Qwen2.5-VL-7B-Instruct")
    for name in ("llava-1.5-7b", "small-llava"):
        (folder / name).symlink_to(folder / "HF_DIR")
    transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER)).save_pretrained(folder / "CLIP_DIR")
    transformers.CLIPImageProcessor(size=32, crop_size=32).save_pretrained(folder / "CLIP_DIR")
    sizes: dict[str, Any] = {**TEXT, "vocab_size": 300}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder / "QWEN_DIR")
    small_model.tokenizer().save_pretrained(folder / "QWEN_DIR")
    shutil.copy(folder / "HF_DIR/chat_template.jinja", folder / "QWEN_DIR")
    (folder / "run.yaml").write_text(
        "model: {vision: {num_attention_heads: 8}, language: {num_attention_heads: 8}}\n"
        "train: {global_batch_size: 128}\n"
    )
    shutil.copy(ROOT / "tests/unit/programs/migrate/llama-factory.yaml", folder / "train.yaml")
    (folder / "ds_config.json").write_text('{"train_batch_size": "auto", "zero_optimization": {"stage": 2}}')
    (folder / "CONFIG.yaml").write_text("checkpoint: {init_from: HF_DIR}\ndata: {datasets: [{path: train.jsonl}]}\n")


def _write_qwen(folder: Path) -> None:
    """Write a tiny Qwen2.5-VL that knows as many positions as the published ones, for their recipes."""
    from tests.support.whole_models import whole_folder

    made, _, _ = whole_folder("qwen2.5-vl", folder.with_name("qwen"))
    config = json.loads((made / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 128_000
    (made / "config.json").write_text(json.dumps(config))
    folder.symlink_to(made)
