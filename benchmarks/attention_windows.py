"""Time Transformer Engine's attention within Qwen2.5-VL's windows: one call over a long list of short sequences.

    python benchmarks/attention_windows.py [--out FILE.json]
    CUDA_VISIBLE_DEVICES= python benchmarks/attention_windows.py --device cpu    # the same code with torch's attention

A tower's windows of 64 patches reach attention packed into one row ("thd" with `cu_seqlens`) or as a batch ("bshd").
The first call with a shape is timed separately, because cuDNN plans in it. Times are medians of forward and backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HEADS, WIDTH, WINDOW = 16, 80, 64  # Qwen2.5-VL's tower: windows of 8 × 8 patches
_REPEATS = 10
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One layout of the same computation: `windows` sequences of 64."""

    layout: str  # "thd", "bshd", or "sdpa": torch's, on a batch
    windows: int
    empty: int = 0  # sequences of no length after them

    @property
    def name(self) -> str:
        return f"{self.layout}, {self.windows} windows" + f" and {self.empty} empty ones" * bool(self.empty)


# Above 512 sequences cuDNN plans anew for each number of them, in Transformer Engine 2.11.
CASES = (
    Case("thd", 340),
    Case("bshd", 340),
    Case("sdpa", 340),
    Case("thd", 340, empty=172),
    Case("thd", 341),
    Case("thd", 600),
    Case("thd", 601),
    Case("bshd", 600),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", metavar="FILE.json", help="also write the table to this file")
    options = parser.parse_args()
    rows = []
    for case in CASES if options.device == "cuda" else small(CASES):
        try:
            first, usual = measure(case, options.device)
            figure = f"{1e3 * usual:.3f} ms, the first call {1e3 * first:.0f} ms"
        except Exception as error:
            figure = f"not measured: {type(error).__name__}: {error}"[:200]
        rows.append({"what": f"attention in windows: {case.name}", "figure": figure, "target": "", "met": None})
        print(f"{rows[-1]['what']}  {figure}", flush=True)
        if options.out is not None:
            Path(options.out).write_text(json.dumps({"rows": rows}, indent=1))


def small(cases: Sequence[Case]) -> list[Case]:
    """Return the case with a fortieth of the windows."""
    return [Case(case.layout, case.windows // 40, case.empty // 40) for case in cases]


def measure(case: Case, device: str) -> tuple[float, float]:
    """Return the seconds of the first call and of a later one, forward and backward."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (case.windows * WINDOW, HEADS, WIDTH)
    query, key, value = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    attention = attention_of(case, device)
    settle: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = []
    for _ in range(1 + _REPEATS):
        settle()
        began = time.perf_counter()
        attention(query, key, value).sum().backward()
        settle()
        seconds.append(time.perf_counter() - began)
    return seconds[0], statistics.median(seconds[1:])


def attention_of(case: Case, device: str) -> Attention:
    """Return attention over [windows · 64, heads, width]; on a CPU torch's replaces Transformer Engine's."""
    if case.layout == "sdpa" or device == "cpu":
        return windows_apart
    import transformer_engine.pytorch as te

    mask = "padding" if case.layout == "thd" else "no_mask"
    run: Any = te.DotProductAttention(HEADS, WIDTH, qkv_format=case.layout, attn_mask_type=mask, attention_dropout=0.0)
    if case.layout == "bshd":
        return lambda *given: run(*(value.view(-1, WINDOW, HEADS, WIDTH) for value in given))
    bounds = torch.tensor(bounds_of(case), dtype=torch.int32, device=device)
    sizes = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds, "max_seqlen_q": WINDOW, "max_seqlen_kv": WINDOW}
    return lambda *given: run(*given, **sizes)


def bounds_of(case: Case) -> list[int]:
    """Return the offsets of the sequences; the offsets of empty ones are the end of the last."""
    ends = [number * WINDOW for number in range(case.windows + 1)]
    return ends + [ends[-1]] * case.empty


def windows_apart(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute torch's attention on a batch of windows."""
    query, key, value = (each.view(-1, WINDOW, HEADS, WIDTH).transpose(1, 2) for each in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)


if __name__ == "__main__":
    main()
