"""Train twelve small runs at two commits and compare their metrics bit for bit.

    python benchmarks/same_numbers.py COMMIT             # that commit against the working tree
    python benchmarks/same_numbers.py COMMIT --only resume pp2-vpp2

A change that moves code must leave every number as it was. Two machines need not agree in the last bit, so both
sides run here. Fields that only one side has, such as a new metric, are listed; those of time and memory are left out.
The exit status is 1 if a number differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megavlm import backend  # noqa: E402

backend.activate()  # before the modules below import megatron-core

from tests.support.clips import clip  # noqa: E402
from tests.support.data_files import write_all  # noqa: E402
from tests.support.training import WALL_TIME  # noqa: E402
from tests.support.whole_models import whole_folder  # noqa: E402

# Sizes in a file: how flags are spelt may differ between the two commits, the keys of configurations do not.
MODEL = """
model:
  vision: {num_layers: 3, hidden_size: 32, ffn_hidden_size: 48, num_attention_heads: 4, image_size: 16, patch_size: 4}
  projector: {pixel_shuffle: 2}
  language:
    {num_layers: 5, hidden_size: 48, ffn_hidden_size: 64, num_attention_heads: 4, num_query_groups: 4, vocab_size: 97}
"""
EXPERTS = "  experts: {num_experts: 4, router_topk: 2, ffn_hidden_size: 32}\n"
COMMON = "--train-iters 6 --gbs 4 --mbs 1 --lr 3e-3 --lr-warmup-iters 2 --no-tensorboard"
COMPUTED = f"{COMMON} --config {{root}}/model.yaml --seq-length 32 --images-per-sample 1 0 2 1 --image-sizes 16 24"
FILES = (
    f"{COMMON} --config {{root}}/model.yaml --seq-length 128"
    " --datasets {root}/files/train.jsonl,image_root={root}/files/images"
    " --tokenizer {root}/files/tokenizer --num-workers 0 --packing-window 16"
)
VIDEOS = (
    f"{COMMON} --init-from {{root}}/video/hf --datasets {{root}}/video/train.jsonl --precision fp32 --seq-length 256"
    " --video-fps 4 --video-max-tokens 100 --num-workers 0 --packing-window 8 --no-save"
)


@dataclass(frozen=True)
class Case:
    """A run on `processes`; `then` are the flags of a second start in the same folder, if there is one."""

    processes: int
    flags: str
    then: str | None = None


CASES: Mapping[str, Case] = {
    "demo": Case(2, "--recipe demo --train-iters 6 --no-tensorboard --pp 2"),
    "pp2-vpp2": Case(2, f"{COMPUTED} --pp 2 --vpp 2"),
    "tp2-pp2": Case(4, f"{COMPUTED} --tp 2 --pp 2"),
    "colocated": Case(2, f"{COMPUTED} --pp 2 --placement colocated"),
    "zero3": Case(2, f"{COMPUTED} --data-parallel-sharding full"),
    "lora": Case(1, f"{VIDEOS} --lora-rank 4"),
    "packed-files": Case(2, f"{FILES} --tp 2"),
    "frozen": Case(2, f"{COMPUTED} --pp 2 --freeze vision"),
    "resume": Case(2, f"{COMPUTED} --tp 2 --train-iters 3 --lr-decay-iters 6", "--train-iters 6"),
    "fp16": Case(1, f"{COMPUTED} --precision fp16"),
    "ep2": Case(2, f"{COMPUTED.replace('model.yaml', 'experts.yaml')} --ep 2"),
    "cp2-video": Case(2, f"{VIDEOS} --cp 2"),
}


def write_inputs(root: Path) -> None:
    """Write the model's sizes, data sets and a small Hugging Face folder that the runs of both sides read."""
    (root / "model.yaml").write_text(MODEL)
    (root / "experts.yaml").write_text(MODEL + EXPERTS)
    write_all(root / "files", samples=40)
    video = root / "video"
    video.mkdir()
    folder, _, _ = whole_folder("qwen2.5-vl", video)
    frames = {"patch_size": 14, "size": {"shortest_edge": 4 * 28**2, "longest_edge": 16 * 28**2}}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(frames))
    for number, count in enumerate((9, 14, 31)):
        (video / f"{number}.mp4").write_bytes(clip(count, rate=12))
    turns = [{"from": "human", "value": "<video>\nWhat happens?"}]
    records = (
        {"video": f"{n % 3}.mp4", "conversations": [*turns, {"from": "gpt", "value": f"{n}, it is blue."}]}
        for n in range(16)
    )
    (video / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@contextmanager
def checked_out(commit: str, root: Path) -> Iterator[Path]:
    """Return a folder with the files of a commit, which is removed afterwards."""
    tree = root / "before"
    subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", str(tree), commit], check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)


def metrics_of(tree: Path, name: str, root: Path, *, side: str) -> list[dict[str, Any]]:
    """Train a case with the program of a tree; return its records. Raises RuntimeError with the end of its output."""
    case, run_dir = CASES[name], root / side / name
    flags = case.flags.format(root=root).split()
    for more in ("", case.then):
        if more is None:
            continue
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.processes)]
        words = [sys.executable, *launcher, "pretrain_vlm.py", *flags, *more.split(), "--run-dir", str(run_dir)]
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} of {tree}: status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def difference(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> tuple[str, set[str]]:
    """Return the first number that differs ("" if none does), and the fields that only one side has."""
    single = {field for one, other in zip(before, after, strict=False) for field in one.keys() ^ other.keys()}
    if len(before) != len(after):
        return f"{len(before)} records, then {len(after)}", single
    for one, other in zip(before, after, strict=True):
        for field in sorted((one.keys() & other.keys()) - WALL_TIME):
            if one[field] != other[field]:
                return f"iteration {one['iteration']}: {field} {one[field]!r}, then {other[field]!r}", single
    return "", single - WALL_TIME


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the commit whose numbers must stay")
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="these runs alone")
    options = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_inputs(root)
        with checked_out(options.commit, root) as tree:
            for name in options.only:
                before = metrics_of(tree, name, root, side="runs-before")
                after = metrics_of(ROOT, name, root, side="runs-after")
                found, single = difference(before, after)
                different += bool(found)
                same = f"{len(after)} records identical, last loss {after[-1]['loss']!r}"
                fields = f"; only one side has {', '.join(sorted(single))}" if single else ""
                print(f"{name:14} {found or same}{fields}", flush=True)
    print(f"{len(options.only)} runs, {different} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
