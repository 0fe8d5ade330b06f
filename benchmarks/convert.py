"""Measure the export of a checkpoint: speed over reading the same files with safetensors alone, and memory.

    .venv/bin/python benchmarks/convert.py [--gigabytes 4]

The script writes a synthetic LLaVA of that size (bf16, several files). A run begins with it, trains
its projector for a step, and saves. Then the script reads every tensor with safetensors, copies the files, and exports
the checkpoint, in turn, each in a process of its own and from disk. The same
with a tiny model gives the start-up time (interpreter, torch, megatron-core), which is subtracted. Prints speed, its
ratio to reading, and the peak of resident memory; appends them to `benchmarks/records/convert.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from record import append, circumstances

ROOT = Path(__file__).parents[1]
HIDDEN, INNER, VOCABULARY = 2048, 5632, 32064
RUN = (
    "--train-iters 1 --global-batch-size 1 --micro-batch-size 1 --seq-length 1024 --freeze vision language "
    "--precision bf16 --no-tensorboard"
).split()
READ = """
import sys, torch
from pathlib import Path
from safetensors import safe_open
total = 0
for file in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(str(file), "pt") as handle:
        for name in handle.keys():
            tensor = handle.get_tensor(name)
            total += int(tensor.view(torch.uint8).flatten()[::4096].sum()) * 0 + tensor.nbytes
print(total)
"""


COPY = """
import os, shutil, sys
shutil.copytree(sys.argv[1], sys.argv[2])
for name in os.listdir(sys.argv[2]):
    with open(os.path.join(sys.argv[2], name)) as file:
        os.fsync(file.fileno())
"""


def synthetic(folder: Path, gigabytes: float) -> int:
    """Write a LLaVA with a small tower and enough Llama layers; return its bytes."""
    import torch
    import transformers
    from safetensors.torch import save_file

    per_layer = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
    layers = max(1, round((gigabytes * 2**30 - 4 * VOCABULARY * HIDDEN) / per_layer))
    hidden, inner = (HIDDEN, INNER) if gigabytes else (64, 128)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
        ),
        text_config=transformers.LlamaConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=16,
            vocab_size=VOCABULARY,
        ),
        image_token_index=VOCABULARY - 1,
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    # Written file by file: this machine need not hold the model.
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration(config)
    names = {_spelled(name): param.shape for name, param in model.named_parameters()}
    files: list[dict[str, torch.Size]] = [{}]
    size = total = 0
    for name, shape in names.items():
        bytes_ = 2 * shape.numel()
        if size + bytes_ > 2**30:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += bytes_
        total += bytes_
    weight_map: dict[str, str] = {}
    for number, held in enumerate(files, start=1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file({name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in held.items()}, folder / file)
        weight_map |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _spelled(name: str) -> str:
    """As in a file: what is in memory `model.language_model.x` is `language_model.model.x` there."""
    name = name.removeprefix("model.")
    if name.startswith("language_model."):
        return name.replace("language_model.", "language_model.model.", 1)
    return f"language_model.{name}" if name.startswith("lm_head") else name


def measured(command: Sequence[str], source: Path) -> tuple[float, float]:
    """Return the seconds and peak resident megabytes of a command that reads `source` from disk, not the page cache."""
    for file in source.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        peak = max(peak, int(found[1]) / 1024 if found else 0.0)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)[:80]} failed")
    return time.perf_counter() - start, peak


def one_round(folder: Path) -> dict[str, tuple[float, float]]:
    """Read, copy and export once."""
    source, ours, back = folder / "hf", folder / "ours", folder / "back"
    for made in (back, folder / "copy"):
        shutil.rmtree(made, ignore_errors=True)
    if not ours.exists():
        measured(["pretrain_vlm.py", *RUN, "--init-from", str(source), "--run-dir", str(ours)], source)
    return {
        "read": measured(["-c", READ, str(source)], source),
        "copy": measured(["-c", COPY, str(source), str(folder / "copy")], source),
        "export": measured(["-m", "megavlm", "convert", "export", str(ours), str(back)], ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    record = circumstances()
    with tempfile.TemporaryDirectory() as name:
        large, tiny = Path(name) / "large", Path(name) / "tiny"
        total = synthetic(large / "hf", options.gigabytes)
        synthetic(tiny / "hf", 0.0)
        print(f"{total / 2**30:.2f} GiB in {len(list((large / 'hf').glob('*.safetensors')))} files")
        rounds = [(one_round(large), one_round(tiny)) for _ in range(options.rounds)]
    record["gigabytes"] = total / 2**30
    seconds = {}
    for what in ("read", "copy", "export"):
        seconds[what] = statistics.median(big[what][0] - small[what][0] for big, small in rounds)
        start = statistics.median(small[what][0] for _, small in rounds)
        peak = max(big[what][1] for big, _ in rounds)
        above = peak - min(small[what][1] for _, small in rounds)
        ratio = seconds["read"] / seconds[what]
        print(
            f"{what:7} {total / seconds[what] / 2**20:6.0f} MiB/s   {ratio:.2f} × reading alone   "
            f"peak {peak:.0f} MiB resident, {above:.0f} above a tiny model's   start-up {start:.1f} s"
        )
        record[what] = {"seconds": seconds[what], "start_up_s": start, "ratio_to_reading": ratio}
        record[what] |= {"peak_mib": peak, "peak_above_tiny_mib": above}
    append("convert", record)


if __name__ == "__main__":
    main()
