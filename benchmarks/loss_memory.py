"""Count the bytes, and time, of the output layer with its loss: some tokens at a time, against all logits at once.

    python benchmarks/loss_memory.py [--quick]

Bytes are those of live tensors at the peak of a forward and a backward pass, at published sizes in bf16, on tensors
without values ("meta"), so the count is exact and takes no memory. Sides: `chunked`, the program's default; `whole`,
the same with the logits of all tokens in memory; and `megatron-core`, whose cross entropy copies them to fp32. What is
saved is in shares of the bf16 logits' bytes.

Times are processor times on the CPU, in fp32, of a small vocabulary: `whole` of all tokens, and `chunked`, an eighth of
them at a time, where all, half and a quarter of the tokens are trained. Sides take turns; figures are medians. Appends
to `benchmarks/records/loss_memory.jsonl`, unless `--quick`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import append, circumstances

from megavlm.config.schema import ExecutionConfig
from megavlm.model.cross_entropy import LossOptions, linear_cross_entropy, vocab_parallel_cross_entropy
from tests.support.live_bytes import LiveBytes

CHUNK = ExecutionConfig().loss_chunk_tokens
# Tokens of a micro-batch, vocabulary, width and tensor-parallel degree: Qwen2.5-VL-7B, Gemma 3 4B, LLaVA-1.5-7B.
CASES = (
    (8192, 152064, 3584, 1),
    (8192, 152064, 3584, 4),
    (8192, 152064, 3584, 8),
    (32768, 152064, 3584, 1),
    (8192, 262208, 2560, 1),
    (8192, 32064, 4096, 1),
    (4096, 152064, 3584, 1),
)
TIMED = (1024, 16384, 256)  # tokens, vocabulary, width
SHARES = (1.0, 0.5, 0.25)  # of tokens that are trained
ALONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)  # ranks exchange three numbers a token, not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cases and one repeat on a few tokens; no record")
    quick = parser.parse_args().quick
    record: dict[str, Any] = {**circumstances(), "chunk": CHUNK}
    record["bytes"] = {name(case): counted(*case) for case in (CASES[:2] if quick else CASES)}
    for title, sides in record["bytes"].items():
        shown = ", ".join(f"{side} {value / 1e9:.2f} GB" for side, value in sides.items() if side != "saved")
        print(f"{title}: {shown}; saved {sides['saved']:.0%} of the logits' bytes")
    tokens, vocabulary, width = (256, 1024, 64) if quick else TIMED
    record["seconds"] = timed(tokens, vocabulary, width, repeats=1 if quick else 5)
    for title, seconds in record["seconds"].items():
        print(f"{tokens} tokens × {vocabulary}: {title} {seconds:.2f} s")
    if not quick:
        append("loss_memory", record)


def name(case: tuple[int, int, int, int]) -> str:
    tokens, vocabulary, _, tp = case
    return f"{tokens} tokens × {vocabulary}, TP{tp}"


def counted(tokens: int, vocabulary: int, width: int, tp: int) -> dict[str, float]:
    """Return the bytes of one rank's logits and of each side's peak, and the share of the logits that is saved."""
    columns = -(-vocabulary // tp)
    sides = {"chunked": ours(CHUNK), "whole": ours(tokens), "megatron-core": fp32_copy}
    found: dict[str, float] = {"logits": 2 * tokens * columns}
    for side, loss in sides.items():
        hidden, weight, labels = inputs(tokens, columns, width, dtype=torch.bfloat16, device="meta")
        counter = LiveBytes([hidden, weight, labels])
        with counter:
            loss(hidden, weight, labels).sum().backward()
        found[side] = counter.peak
    return {**found, "saved": (found["whole"] - found["chunked"]) / found["logits"]}


def timed(tokens: int, vocabulary: int, width: int, *, repeats: int) -> dict[str, float]:
    """Return the median processor seconds of each side, forward and backward."""
    hidden, weight, labels = inputs(tokens, vocabulary, width, dtype=torch.float32, device="cpu")
    sides = {"whole": (ours(tokens), tokens)}
    for share in SHARES:
        sides[f"chunked, {share:.0%} trained"] = (ours(tokens // 8), int(share * tokens))
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats + 1):
        for side, (loss, count) in sides.items():
            begin = time.process_time()
            loss(hidden[:count], weight, labels[:count]).sum().backward()
            seconds[side].append(time.process_time() - begin)
    return {side: statistics.median(each[1:]) for side, each in seconds.items()}


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(chunk: int) -> Loss:
    """Return the program's loss with so many tokens at a time."""

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        options = LossOptions(ALONE, real=len(weight), chunk=chunk, cross_entropy=vocab_parallel_cross_entropy)
        return linear_cross_entropy(hidden, weight, labels, options)

    return loss


def fp32_copy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return megatron-core's loss of whole logits."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy as Steps

    class Loss(torch.autograd.Function):
        """`_VocabParallelCrossEntropy` without its reductions, which do nothing on one rank."""

        @staticmethod
        def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
            logits, largest = Steps.calculate_logits_max(logits)
            mask, positions, predicted, sums, exponents = Steps.calculate_predicted_logits(
                logits, labels, largest, 0, logits.shape[-1]
            )
            softmax, loss = Steps.calculate_cross_entropy_loss(exponents, predicted, sums)
            ctx.save_for_backward(softmax, mask, positions)
            return loss

        @staticmethod
        def backward(ctx: Any, arrives: Tensor) -> tuple[Tensor, None]:
            softmax, mask, positions = ctx.saved_tensors
            prepared = Steps.prepare_gradient_calculation_operands(softmax, mask)
            flat, rows, update, gradient = prepared
            return Steps.calculate_gradients(flat, rows, positions, update, gradient, arrives), None

    found: Tensor = Loss.apply(hidden @ weight.t(), labels)
    return found


def inputs(tokens: int, vocabulary: int, width: int, *, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    hidden = torch.zeros(tokens, width, dtype=dtype, device=device, requires_grad=True)
    weight = torch.zeros(vocabulary, width, dtype=dtype, device=device, requires_grad=True)
    return hidden, weight, torch.zeros(tokens, dtype=torch.int64, device=device)


if __name__ == "__main__":
    main()
