"""Converting a checkpoint: speed against reading the same files with safetensors alone, and memory.

    .venv/bin/python benchmarks/convert.py [--gigabytes 4]

Writes a synthetic LLaVA of that size (bf16, several files), then in turn, each in a process of its own: reads every
tensor with safetensors, imports it, and exports it again. Prints megabytes per second, their ratio to reading, and the
peak of resident memory; appends them to `benchmarks/records/convert.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import append, circumstances

ROOT = Path(__file__).parents[1]
HIDDEN, INNER, VOCABULARY = 2048, 5632, 32064
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


def synthetic(folder: Path, gigabytes: float) -> int:
    """A LLaVA with a small tower and as many Llama layers as it takes; returns its bytes."""
    import torch
    import transformers
    from safetensors.torch import save_file

    per_layer = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
    layers = max(1, round((gigabytes * 2**30 - 4 * VOCABULARY * HIDDEN) / per_layer))
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=4),
        text_config=transformers.LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=INNER,
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


def measured(command: list[str]) -> tuple[float, float]:
    """Seconds and peak resident megabytes of a command, files read from disk as far as we can tell the system to."""
    subprocess.run(["sync"], check=True)
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:
        try:
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    peak = max(peak, int(line.split()[1]) / 1024)
        except OSError:
            break
        time.sleep(0.02)
    if process.wait():
        raise SystemExit(f"{command[0]} failed")
    return time.perf_counter() - start, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    record = circumstances()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total = synthetic(folder / "hf", options.gigabytes)
        print(f"{total / 2**30:.2f} GiB in {len(list((folder / 'hf').glob('*.safetensors')))} files")
        results: dict[str, list[tuple[float, float]]] = {"read": [], "import": [], "export": []}
        for _ in range(options.rounds):
            for done in (folder / "ours", folder / "back"):
                shutil.rmtree(done, ignore_errors=True)
            results["read"].append(measured(["-c", READ, str(folder / "hf")]))
            results["import"].append(measured(["tools/convert.py", "import", str(folder / "hf"), str(folder / "ours")]))
            results["export"].append(
                measured(["tools/convert.py", "export", str(folder / "ours"), str(folder / "back")])
            )
    best = {what: min(seconds for seconds, _ in runs) for what, runs in results.items()}
    record["gigabytes"] = total / 2**30
    for what, runs in results.items():
        peak = max(megabytes for _, megabytes in runs)
        ratio = best["read"] / best[what]
        speed = total / best[what] / 2**20
        print(f"{what:7} {speed:6.0f} MiB/s   {ratio:.2f} × reading alone   peak {peak:.0f} MiB resident")
        record[what] = {"seconds": [seconds for seconds, _ in runs], "ratio_to_reading": ratio, "peak_mib": peak}
    append("convert", record)


if __name__ == "__main__":
    main()
