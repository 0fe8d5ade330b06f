"""Plan long sequences: the fastest predicted layouts of Qwen2.5-VL at 32k to 1M tokens, and how long rows may become.

    python benchmarks/long_context.py [7b 72b] [--write]      # --write: into docs/reports/predictions.md, too

Each sample is a row of its own: images of 1,008² (1,296 features each) among text, 4 million tokens a step, as
`megavlm plan` plans it. "Up to" is the length at which the same layout would no longer fit, if what grows with the
length (activations, batches) goes on as it does; "memory" says whose: the device's, or the host's. Nothing is measured.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass
from pathlib import Path

from tables import with_table

from megavlm.planner.evaluator import GIB, Estimate
from megavlm.planner.hardware import Hardware, profile
from megavlm.planner.host_memory import HostMemory
from megavlm.planner.search import search
from megavlm.programs import plan
from megavlm.rules.defaults import resolve

DOCUMENT = Path(__file__).parents[1] / "docs" / "reports" / "predictions.md"
GPUS = {"7b": {2**15: 8, 2**17: 16, 2**20: 64}, "72b": {2**15: 64, 2**17: 64, 2**20: 256}}
IMAGES = {2**15: 16, 2**17: 64, 2**20: 512}
TOKENS = 2**22  # of a step
NAMES = {2**15: "32k", 2**17: "128k", 2**20: "1M"}
USUAL = re.compile(r"\b(?:(?:TP|CP|PP|VPP|DP)1|mbs 1|recompute none|stages) ")  # left out of a layout's name


@dataclass(frozen=True)
class Row:
    model: str
    length: int
    gpu: str

    @property
    def argv(self) -> list[str]:
        """Return the arguments of megavlm plan."""
        return (
            f"--model qwen2_5_vl_{self.model} --gpus {GPUS[self.model][self.length]} --gpu {self.gpu} --seq-length "
            f"{self.length} --images {IMAGES[self.length]}x1008 --gbs {TOKENS // self.length} --top 1"
        ).split()

    def line(self) -> str:
        options, hardware = plan.options_of(self.argv), profile(self.gpu)
        began = time.process_time()
        found = search(resolve(plan.configuration(options), vocab_size=plan.VOCABULARY), options.gpus, hardware, top=1)
        seconds, best = time.process_time() - began, found.best[0]
        print(
            f"{self}: {seconds:.1f} s of processor time, {found.tried} tried, {found.simulated} simulated", flush=True
        )
        length, place = longest(best, self.length, hardware)
        label = USUAL.sub("", best.candidate.label)
        return (
            f"| {self.model.upper()} | {NAMES[self.length]} | {options.gpus} {self.gpu.upper()} "
            f"| {label} | {best.step.seconds:.0f} | {best.tokens_per_second:,.0f} | {best.mfu:.1%} "
            f"| {best.step.peak / GIB:.0f} | {length // 1024:,}k, {place} |"
        )


def longest(estimate: Estimate, length: int, hardware: Hardware) -> tuple[int, str]:
    """Return how long rows of this layout may be before a memory is full, in 16k tokens, and whose memory it is."""
    fullest = max(estimate.step.memory, key=lambda memory: memory.total)
    rooms = {"device": (hardware.memory - fullest.model_state) / (fullest.total - fullest.model_state)}
    host = max(estimate.step.host, key=lambda memory: memory.total, default=HostMemory())
    if host.activations:
        room = hardware.own_host.memory / min(estimate.candidate.dims.world, hardware.devices_per_node)
        rooms["host"] = (room - host.moments) / max(host.activations, host.pieces)
    place = min(rooms, key=rooms.__getitem__)
    return int(length * rooms[place]) >> 14 << 14, place


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("models", nargs="*", help="7b, 72b; default: both")
    arguments.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    options = arguments.parse_args()
    rows = [
        Row(model, length, gpu)
        for model in options.models or GPUS
        for length in GPUS[model]
        for gpu in ("h100", "h200")
    ]  # fmt: skip
    head = "| model | tokens | GPUs | fastest layout | step s | tokens/s | MFU | GiB | up to, memory |"
    lines = [head, "|---" * 9 + "|"]
    for row in rows:
        lines.append(row.line())
        print(lines[-1], flush=True)
    table = "\n".join(lines)
    if options.write:
        DOCUMENT.write_text(with_table(DOCUMENT.read_text(), "benchmarks/long_context.py", table))


if __name__ == "__main__":
    main()
