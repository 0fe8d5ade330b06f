"""The training program as cases run it: same parser, rules, builder and loop as `pretrain_vlm.py`."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

from tests.support.gradients import assert_same_gradients, keep_gradients

# Uneven on purpose: vision 3 layers, language 5, odd widths, images of none, one, two and two sizes.
SMALL = (
    "--train-iters 4 --lr-decay-iters 20 --global-batch-size 4 --micro-batch-size 1 --seq-length 32 --no-tensorboard "
    "--set model.vision.num_layers=3 model.vision.hidden_size=32 model.vision.ffn_hidden_size=48 "
    "model.vision.num_attention_heads=4 model.vision.image_size=16 model.vision.patch_size=4 "
    "model.projector.pixel_shuffle=2 model.language.num_layers=5 model.language.hidden_size=48 "
    "model.language.ffn_hidden_size=64 model.language.num_attention_heads=4 model.language.num_query_groups=4 "
    "model.language.vocab_size=97 --images-per-sample 1 0 2 1 --image-sizes 16 24 --lr 1e-3 --lr-warmup-iters 2"
).split()

# A layer of the tower and three of the language model: as many as two stages of two chunks each need.
LEAN = [*SMALL, *"--set model.vision.num_layers=1 model.language.num_layers=3".split()]

# One layer of each part: most of a run is what surrounds the steps.
SHALLOW = [*SMALL, *"--set model.vision.num_layers=1 model.language.num_layers=1 --lr-warmup-iters 1".split()]

# What tests that compare with one process make of it: `make test` its beginning, `make test-all` more.
THREE, LONG = "--train-iters 3".split(), "--train-iters 20".split()

# MEGAVLM_TEST_PRECISION=bf16 compares layouts in bf16, where Transformer Engine refuses fp32 on a GPU: its 8 bits of
# mantissa let a loss near 4.6 agree to 1e-2.
IN_BF16 = os.environ.get("MEGAVLM_TEST_PRECISION") == "bf16"
PRECISION = ["--precision", "bf16"] if IN_BF16 else []

# 200 steps in which the loss falls from ln 95 = 4.55 to a few hundredths above the entropy of the text, 1.68. Where a
# loss goes towards zero (the demo's), two runs in bf16 that differ in the order of their sums are 10 % apart on the
# way, and a hundredth says nothing.
TEXT_TO_LEARN = [
    *SMALL,
    *"--precision bf16 --no-save --train-iters 200 --lr-decay-iters 200 --lr-warmup-iters 10 --lr 3e-3".split(),
    *"--set model.vision.num_layers=2 model.vision.ffn_hidden_size=64 model.language.num_layers=2".split(),
    *"--micro-batch-size 4 --seq-length 64 --set data.answer_share=0.6".split(),
]

WALL_TIME = {
    *("time", "save_stall_s", "save_time_s", "eval_time_s", "eval_time_fraction", "sample_time_s"),
    *(
        "step_time_s",
        "data_time_s",
        "tokens_per_second",
        "images_per_second",
        "samples_per_second",
        "model_tflops_per_device",
        "mfu",
    ),
    *("peak_memory_gib", "stage_memory_gib", "energy_j"),
    "gradients",  # a path
    *("phase_seconds", "slowest_rank", "slowest_rank_s", "slowest_rank_excess", "slowest_rank_phase", "slow"),
}


@contextlib.contextmanager
def started(argv: Sequence[str], run_dir: str, prepare: Callable[[Any], Any] = lambda config: config) -> Iterator[Any]:
    """Give a run that has not made a step, on this process's world, in place of whatever layout ran before.

    It is closed at the end, but not after an error: the other ranks, which closing waits for, may not come.
    """
    from megavlm.train.loop import close

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = _built(argv, run_dir, prepare)
    yield run
    close(run)


def _built(argv: Sequence[str], run_dir: str, prepare: Callable[[Any], Any]) -> Any:
    import torch.distributed as dist

    from megavlm import backend
    from megavlm.command_line.parsing import parse
    from megavlm.parallel.groups import destroy_groups
    from megavlm.rules.check import check
    from megavlm.train.build import build

    config = prepare(parse([*argv, *PRECISION, "--run-dir", run_dir]))
    check(config, world=dist.get_world_size())
    destroy_groups()
    return build(config, backend.activate())


def train(
    argv: Sequence[str],
    run_dir: str,
    prepare: Callable[[Any], Any] = lambda config: config,
    *,
    printed: io.StringIO | None = None,
) -> None:
    """One run of the program on this process's world; `printed` gets what it prints."""
    from megavlm.planner.auto import explain
    from megavlm.train.loop import fit

    with contextlib.redirect_stdout(printed or io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = _built(argv, run_dir, prepare)
        keep_gradients(run)
        fit(run, explain=explain)


@contextlib.contextmanager
def asking_to_stop() -> Iterator[Callable[[], None]]:
    """Give what asks the run of this process to stop, as a signal does, if it has not been asked; on rank 0 alone."""
    import torch.distributed as dist

    from megavlm.resilience.signals import StopRequest

    requests: list[StopRequest] = []
    began = StopRequest.training

    def beginning(self: StopRequest) -> Any:
        requests.append(self)
        return began(self)

    def ask() -> None:
        if dist.get_rank() == 0 and not requests[0].requested:
            requests[0].ask("the test", warning=True)

    with mock.patch.object(StopRequest, "training", beginning):
        yield ask


def metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The run's metrics.jsonl; `gradients` of its first steps are files of `keep_gradients`."""
    records = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if (path := Path(run_dir, "gradients", str(record["iteration"]))).exists():
            record["gradients"] = path
    return records


def of_kind(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The run's events of one kind, in the order in which they were written."""
    from megavlm.resilience.events import events

    return [event for event in events(run_dir) if event["kind"] == kind]


def assert_same_curve(
    actual: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], *, tolerance: float = 1e-5
) -> None:
    """Loss and gradient norm of every iteration agree within a relative tolerance, as does each parameter's gradient
    in the first; counts agree exactly.
    """
    assert [record["iteration"] for record in actual] == [record["iteration"] for record in expected]
    assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in actual)
    for name in ("tokens", "trained_tokens", "images", "image_tokens", "learning_rate"):
        assert [record[name] for record in actual] == [record[name] for record in expected], name
    off, where = farthest_apart(actual, expected)
    tolerance = 1e-2 if IN_BF16 else tolerance
    assert off <= tolerance, f"{where} is off by {off:.2e} (relative)"
    for a, e in zip(actual, expected, strict=True):
        if "gradients" in a and "gradients" in e:
            assert_same_gradients(a["gradients"], e["gradients"], tolerance=tolerance)


def farthest_apart(actual: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> tuple[float, str]:
    """Return the largest relative difference of losses and gradient norms of two runs, and where it is."""
    return max(
        (abs(a[name] - e[name]) / abs(e[name]), f"{name} of iteration {a['iteration']}")
        for a, e in zip(actual, expected, strict=True)
        for name in ("loss", "grad_norm", *(("mtp_loss",) if "mtp_loss" in e else ()))
    )


def assert_within_a_hundredth(actual: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """Two runs of TEXT_TO_LEARN: mean losses of every 25 steps, and that both have learned."""
    from megavlm.data.synthetic import entropy

    ours, theirs = ([record["loss"] for record in records] for records in (actual, expected))
    assert ours != theirs
    means = [[fmean(curve[start : start + 25]) for start in range(0, 200, 25)] for curve in (ours, theirs)]
    assert all(abs(curve[-1] / entropy(95) - 1) < 0.1 for curve in means), means
    worst = max(abs(a / b - 1) for a, b in zip(*means, strict=True))
    assert worst < 0.01, f"{100 * worst:.2f} % apart"


def without_wall_time(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must be bit-identical when a run is repeated."""
    return [{name: value for name, value in record.items() if name not in WALL_TIME} for record in records]


def assert_resumed(
    actual: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], *, tolerance: float = 1e-5
) -> None:
    """A run that was stopped gives the records of one that was not: on a CPU bit for bit.

    On a GPU some kernels of the backward pass add in no fixed order, so there the curves are the same within a relative
    tolerance.
    """
    import torch

    if torch.cuda.is_available():
        assert_same_curve(actual, expected, tolerance=tolerance)
    else:
        assert without_wall_time(actual) == without_wall_time(expected)


def train_composed(argv: list[str], run_dir: str) -> None:
    """`train`, with the model that the folders hold."""
    from megavlm.checkpoint.hf.pretrained import with_pretrained_model

    train(argv, run_dir, prepare=with_pretrained_model)
