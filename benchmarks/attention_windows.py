"""Time Transformer Engine's attention within Qwen2.5-VL's windows: one call over a long list of short sequences.

    python benchmarks/attention_windows.py [--out FILE.json]
    python benchmarks/attention_windows.py --causal 8192 32768    # of a language model: forward and backward apart
    CUDA_VISIBLE_DEVICES= python benchmarks/attention_windows.py --device cpu    # the same code with torch's attention

A tower's windows of 64 patches reach attention packed into one row ("thd" with `cu_seqlens`) or as a batch ("bshd").
The first call with a shape is timed separately, because cuDNN plans in it. Times are medians of forward and backward.
`--causal` times one sequence of 32 heads of 128 channels; its rates count 2.5 × the forward FLOPs for the backward
pass, which computes the scores again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
    options = parsed()
    rows: list[dict[str, Any]] = []
    asked: list[tuple[str, Callable[[], str]]] = [
        (f"attention in windows: {case.name}", partial(in_windows, case, options.device))
        for case in (CASES if options.device == "cuda" else small(CASES))
    ]
    if options.causal:
        asked = [
            (f"causal attention: {tokens} tokens, {of}", partial(causal, tokens, of, options.device))
            for tokens in options.causal
            for of in (("te", "sdpa") if options.device == "cuda" else ("sdpa",))
        ]
    for what, measured in asked:
        try:
            figure = measured()
        except Exception as error:
            figure = f"not measured: {type(error).__name__}: {error}"[:200]
        rows.append({"what": what, "figure": figure, "target": "", "met": None})
        print(f"{rows[-1]['what']}  {figure}", flush=True)
        if options.out is not None:
            Path(options.out).write_text(json.dumps({"rows": rows}, indent=1))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--causal", type=int, nargs="+", metavar="TOKENS", help="time causal sequences of these lengths"
    )
    parser.add_argument("--out", metavar="FILE.json", help="also write the table to this file")
    return parser.parse_args()


def in_windows(case: Case, device: str) -> str:
    """Return the time of a case, and of its first call."""
    first, usual = measure(case, device)
    return f"{1e3 * usual:.3f} ms, the first call {1e3 * first:.0f} ms"


def causal(tokens: int, of: str, device: str) -> str:
    """Return times and rates of both passes over one causal sequence; `of` is "te" or "sdpa", torch's."""
    heads, width = 32, 128
    shape = (1, tokens, heads, width) if of == "te" else (1, heads, tokens, width)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    attention: Attention = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    if of == "te":
        import transformer_engine.pytorch as te

        attention = te.DotProductAttention(
            heads, width, qkv_format="bshd", attn_mask_type="causal", attention_dropout=0.0
        )
    settle: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    forward, backward = [], []
    for _ in range(1 + _REPEATS):
        settle()
        began = time.perf_counter()
        output = attention(query, key, value)
        settle()
        between = time.perf_counter()
        output.backward(torch.ones_like(output))
        settle()
        forward.append(between - began)
        backward.append(time.perf_counter() - between)
    flops = 2 * 2 * tokens**2 / 2 * heads * width  # two products; half of the scores
    times = [statistics.median(seconds[1:]) for seconds in (forward, backward)]
    rates = [share * flops / seconds / 1e12 for share, seconds in zip((1, 2.5), times, strict=True)]
    return "; ".join(
        f"{name} {1e3 * seconds:.3f} ms, {rate:.0f} TFLOP/s"
        for name, seconds, rate in zip(("forward", "backward"), times, rates, strict=True)
    )


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
