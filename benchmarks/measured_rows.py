"""List the rows of docs/reports/measured.md: what each figure is, its record and its command."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from measured_values import (
    FROZEN,
    Value,
    against,
    at,
    clips,
    context,
    errors,
    experts,
    gpu,
    grown,
    images,
    kept_throughput,
    language_rate,
    loss_time,
    memory_predicted,
    of_1024,
    started,
    step_rate,
    step_share,
    step_time,
    vision_time_saved,
    with_processes,
)


@dataclass(frozen=True)
class Row:
    """A figure: `value` reads it from a record of `records/RECORD.jsonl`, or returns None where the record lacks it.

    Records before `since` (a date) measured another program: the row's command has been rewritten since then.
    """

    what: str
    record: str
    command: str
    value: Value
    form: str = "{:.2f} ×"
    by_the_clock: bool = False
    since: str = ""


PLACEMENT = "python benchmarks/placement.py"
PIPELINE = "PP2, trained encoder"
CONVERT, CONVERT_SINCE = "python benchmarks/convert.py", "2026-11-21T09:30"  # pieces on several threads
CHECKPOINT, CHECKPOINT_SINCE = "python benchmarks/checkpoint.py", "2026-11-22T12:00"  # read once
CPU_STEP, DATA, IMAGES, UPLOADS = (
    f"python benchmarks/{name}.py" for name in ("cpu_step", "data", "data_images", "uploads")
)
START = "python benchmarks/start.py"
LOSS, VIDEO = "python benchmarks/loss_memory.py", "python benchmarks/video.py"
PLANNER = (
    "torchrun --nproc-per-node 2 -m megavlm calibrate --out mine.json"
    " && python benchmarks/planner.py --profile mine.json"
)
PLANNER_SINCE = "2026-11-21T11:54"  # calls of a layer are counted


def _placements() -> list[Row]:
    """Return rows by the clock and by processor time of the busier process."""
    requested = [
        ("encoder colocated, PP2: over glued", PIPELINE, "colocated"),
        ("cut evenly by FLOPs, PP2: over glued", PIPELINE, "stages, cut evenly"),
        *(
            (
                f"encoder colocated, TP2, {side} pixels: over tensor-parallel",
                question,
                "colocated",
            )
            for count, side in ((8, 112), (1, 336))
            for question in [f"TP2, {count} images of {side} × {side} pixels per sample"]
        ),
        ("frozen encoder that encodes ahead, PP2, two micro-batches: times faster", FROZEN, "encoded ahead"),
    ]
    return [
        Row(f"{what}, {how}", "placement", PLACEMENT, at("results", question, side, key), by_the_clock=clock)
        for what, question, side in requested
        for how, key, clock in (("by the clock", "gain_clock", True), ("processor time", "gain_busiest", False))
    ]


FILES = "megavlm bf16 of JPEG files"
# The time was over before that side.
NOT_MEASURED = ("Qwen2.5-VL-7B, 2 images, bf16: speed over Transformers wholly in bf16",)


def _gpu() -> list[Row]:
    """Return rows of both models on one GPU, as many language layers as fit."""
    command, since = "python benchmarks/gpu_vlm.py", "2026-11-23T02:00"  # steps follow one another since then
    rows = []
    for shape, side in (
        ("LLaVA-1.5-7B", "megavlm bf16"),
        ("LLaVA-1.5-7B", FILES),
        ("LLaVA-1.5-7B", "megavlm fp8"),
        ("Qwen2.5-VL-7B, 2 images", "megavlm bf16"),
    ):
        theirs = " on tensors" * (side == FILES)
        figures: list[tuple[str, Callable[[dict[str, Any], float], float | None], str]] = [
            ("step", step_time, "{:.3f} s"),
            (f"speed over Transformers{theirs} with autocast", against("transformers autocast"), "{:.2f} ×"),
            (f"speed over Transformers{theirs} wholly in bf16", against("transformers bf16"), "{:.2f} ×"),
        ]
        if side != FILES:
            figures += [
                ("whole step", step_rate, "{:.0f} TFLOP/s"),
                ("whole step, MFU", step_share(side.split()[1]), "{:.1%}"),
                ("language part", language_rate(side), "{:.0f} TFLOP/s"),
                ("predicted peak memory over the measured", memory_predicted(side), "{:.3f}"),
            ]
        found = [
            Row(f"{shape}, {side[8:]}: {what}", "gpu_vlm", command, gpu(shape, side, figure), form, True, since)
            for what, figure, form in figures
        ]
        rows += [row for row in found if row.what not in NOT_MEASURED]
    return rows


def _h200() -> list[Row]:
    """Return rows of LLaVA on one H200, with twice the layers."""
    command = "tools/gpu_check.sh --minutes 30 --items files,micro-batches"
    return [
        Row(
            f"H200, {side[8:]}{words}: {what}",
            "gpu_vlm_h200",
            command,
            gpu("LLaVA-1.5-7B", side, figure, count),
            form,
            True,
        )
        for count, words in ((1, ""), (4, ", four micro-batches"))
        for side in ("megavlm bf16", FILES, "megavlm fp8")
        if count == 1 or side != FILES
        for what, figure, form in (
            ("step", step_time, "{:.3f} s"),
            ("whole step", step_rate, "{:.0f} TFLOP/s"),
            ("whole step, MFU", step_share(side.split()[1]), "{:.1%}"),
            ("speed over Transformers wholly in bf16", against("transformers bf16"), "{:.2f} ×"),
        )
        if what == "step" or (side != FILES and ("Transformers" not in what or (side, count) == ("megavlm bf16", 1)))
    ]


ROWS = (
    *_gpu(),
    *_h200(),
    Row(
        "CPU training step, one process: throughput over Transformers'",
        "cpu_step",
        CPU_STEP,
        at("against_transformers", "throughput_ratio"),
        by_the_clock=True,
    ),
    Row("the same, processor time", "cpu_step", CPU_STEP, at("against_transformers", "cpu_time_ratio")),
    *_placements(),
    Row(
        "vision cache: share of the encoder's processor time saved",
        "placement",
        PLACEMENT,
        vision_time_saved,
        "{:.0%}",
    ),
    Row(
        "logits of 8,192 tokens × 152,064: share of bytes that a loss in chunks saves",
        "loss_memory",
        LOSS,
        at("bytes", "8192 tokens × 152064, TP1", "saved"),
        "{:.0%}",
    ),
    Row(
        "the same on one of eight tensor-parallel ranks",
        "loss_memory",
        LOSS,
        at("bytes", "8192 tokens × 152064, TP8", "saved"),
        "{:.0%}",
    ),
    Row(
        "output layer and loss in eight chunks, trained: processor time over whole logits",
        "loss_memory",
        LOSS,
        loss_time("100%"),
    ),
    Row("the same where half of the tokens are trained", "loss_memory", LOSS, loss_time("50%")),
    Row(
        "median error of step times, 16 configurations of two processes",
        "planner",
        PLANNER,
        lambda record: statistics.median(errors(record)),
        "{:.1%}",
        by_the_clock=True,
        since=PLANNER_SINCE,
    ),
    Row(
        "largest error of the same",
        "planner",
        PLANNER,
        lambda record: max(errors(record)),
        "{:.0%}",
        by_the_clock=True,
        since=PLANNER_SINCE,
    ),
    Row(
        "search over 1,024 GPUs (Qwen2.5-VL-72B), processor time",
        "search",
        "python benchmarks/search.py",
        of_1024,
        "{:.1f} s",
        since="2026-11-22",  # a GPU's passes and launches are counted
    ),
    *(
        Row(
            f"{what}, {ranks:,} ranks{how}",
            "scale",
            "python benchmarks/scale.py",
            grown(name, ranks),
            "{:,.0f}",
            since="2026-11-27T20",  # pointers of git-lfs are looked for once
        )
        for what, name, ranks, how in (
            ("groups that a rank makes at TP8·PP8", "groups that a rank makes", 16384, ""),
            ("requests to the store in a second", "requests to the store in a second", 16384, ""),
            ("files of a checkpoint that all ranks open", "load: opens", 1024, ", by law"),
            ("the same: `stat`", "load: stats", 1024, ", by law"),
            ("flushes of a save", "save: flushes", 1024, ", by law"),
            ("files opened to start from Hugging Face files", "start: opens", 1024, ", by law"),
        )
    ),
    *(
        Row(f"start to the demo's first step{how}", "start", START, started(cold=cold), "{:.1f} s", by_the_clock=True)
        for how, cold in (("", False), (", without compiled modules", True))
    ),
    Row(
        "export of 4 GiB: speed over reading alone",
        "convert",
        CONVERT,
        at("export", "ratio_to_reading"),
        by_the_clock=True,
        since=CONVERT_SINCE,
    ),
    Row(
        "copying the same files: speed over reading alone",
        "convert",
        CONVERT,
        at("copy", "ratio_to_reading"),
        by_the_clock=True,
    ),
    Row(
        "export of 4 GiB: peak of resident memory",
        "convert",
        CONVERT,
        at("export", "peak_mib"),
        "{:.0f} MiB",
        since=CONVERT_SINCE,
    ),
    *(
        Row(
            f"asynchronous save, {count}: wait beyond the copy to the host, of a synchronous save",
            "checkpoint",
            CHECKPOINT,
            with_processes(processes, "stall_beyond_copy_of_sync"),
            "{:.1%}",
            by_the_clock=True,
            since=CHECKPOINT_SINCE,
        )
        for processes, count in ((1, "one process"), (2, "2 processes"))
    ),
    *(
        Row(
            f"step beside a save, {count}, over one alone",
            "checkpoint",
            CHECKPOINT,
            with_processes(processes, "step_beside_a_save"),
            by_the_clock=True,
            since="2026-11-26T22:15",  # writers have a low priority
        )
        for processes, count in ((1, "one process"), (2, "2 processes"))
    ),
    *(
        Row(
            f"verifying while loading (page cache), {count}: processor time beyond that of a load",
            "checkpoint",
            CHECKPOINT,
            with_processes(processes, "verification_of_load_cpu"),
            "{:.0%}",
            since=CHECKPOINT_SINCE,
        )
        for processes, count in ((1, "one process"), (8, "8 processes"))
    ),
    *(
        Row(
            f"beside a copy to an S3 server: {what}",
            "uploads",
            UPLOADS,
            at(key),
            by_the_clock=True,
        )
        for what, key in (
            ("wait for a save, over that without", "stall_of_alone"),
            ("time of a step, over that without", "step_of_alone"),
        )
    ),
    Row(
        "ten faults in 20 minutes, two processes: time in steps that stay, over a run without",
        "goodput",
        "python benchmarks/goodput.py run",
        at("run", "ratio"),
        by_the_clock=True,
    ),
    Row(
        "the same: throughput of iterations that stay, over a run without",
        "goodput",
        "python benchmarks/goodput.py run",
        kept_throughput,
        by_the_clock=True,
    ),
    Row(
        "JPEG to patches, one core: speed over Transformers' (median of six families, three sizes)",
        "data_images",
        IMAGES,
        images("ours"),
    ),
    Row("the same, resized by torch (not exact)", "data_images", IMAGES, images("fast")),
    Row(
        "clip to patches of Qwen2.5-VL, one core: frames/s over Transformers' (median of three sizes)",
        "video",
        VIDEO,
        clips("clip"),
    ),
    Row("the same from decoded frames on", "video", VIDEO, clips("pixels")),
    *(
        Row(
            f"`--cp {cp}`, {tokens:,} tokens: busier rank's {what} over one process's",
            "context",
            "python benchmarks/context.py",
            context(tokens, cp, key),
        )
        for tokens in (8192, 32768)
        for cp in (2, 4)
        for what, key in (("memory", "bytes"), ("processor time", "seconds"))
    ),
    *(
        Row(
            f"2 of 8 experts, even load, 4,096 tokens, {what}",
            "experts",
            "python benchmarks/experts.py",
            experts(*case),
        )
        for what, case in (
            (
                "one process: processor time over a dense model's of as many active FLOPs",
                ("mixture", "dense", "seconds"),
            ),
            (
                "`--ep 2`: processor time of the busier rank over a dense model's on two replicas",
                ("mixture, EP 2", "dense, DP 2", "seconds"),
            ),
            ("`--ep 2`: memory of the busier rank over one process's", ("mixture, EP 2", "mixture", "bytes")),
        )
    ),
    *(
        Row(
            f"packing to 8,192, {what}: share of positions with tokens",
            "data",
            DATA,
            at("packing", key, "useful"),
            "{:.1%}",
        )
        for what, key in (
            ("best fit decreasing (ours)", "best fit, decreasing (ours)"),
            ("first fit", "first fit"),
            ("in order", "in order"),
            ("a sequence for each sample", "naive padding"),
        )
    ),
    *(
        Row(
            f"{part} load of 32 ranks {when} balancing, largest over mean",
            "data",
            DATA,
            at("imbalance", when, part),
            "{:.3f}",
        )
        for part in ("vision", "language")
        for when in ("before", "after")
    ),
    *(
        Row(what, "demo", "python benchmarks/demo.py", at(name), form, clock, "2026-11-25")  # with eight heads
        for what, name, form, clock in (
            ('held-out answers to "which digits?" that are right', "right", "{:.1%}", False),
            ("the same with the images shuffled", "right_shuffled", "{:.1%}", False),
            ("time after installation", "seconds", "{:.0f} s", True),
            ("share of the time that waits for data", "waiting_for_data", "{:.1%}", True),
        )
    ),
)
