"""A training run beside its steps: hooks, time lost, its folder and vocabulary, spikes, replicas and answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megavlm.arch.dims import Dims
from megavlm.arch.kinds import step_flops
from megavlm.arch.plan import make_plan
from megavlm.arch.workload import typical_workload
from megavlm.checkpoint import reading
from megavlm.checkpoint.manifest import Damaged
from megavlm.checkpoint.state import Position
from megavlm.command_line.parsing import parse
from megavlm.data.collate import CollateSpec
from megavlm.data.file_source import FilesSource
from megavlm.data.synthetic import SyntheticSource
from megavlm.data.types import Sample
from megavlm.demo.digits import DigitsSource
from megavlm.errors import UserError
from megavlm.inputs.batch import MicroBatch
from megavlm.planner.hardware import Rates
from megavlm.resilience.hang_reports import PATIENCE
from megavlm.resilience.phases import OTHER, Phases
from megavlm.rules.defaults import resolve
from megavlm.train import generate, loop, run_dir
from megavlm.train.build_source import vocab_size_of
from megavlm.train.calibration import TimedLayer, fit, predicted
from megavlm.train.hooks import step_guard, trace
from megavlm.train.hooks.device_checks import checksum, minority
from megavlm.train.hooks.hook import RankHook
from megavlm.train.hooks.step_guard import DataPlace, standing_out
from megavlm.train.loop import Hooks
from megavlm.train.run_dir import make_run_dir
from tests.support.data_files import write_tokenizer
from tests.support.manifests import committed

METHODS = ("begin", "on_step_begin", "measure", "on_step_end", "finish")


class Noted(RankHook):
    """Notes its calls, measures one number, and ends the run after a step if it is to."""

    def __init__(self, name: str, calls: list[str], *, ends_after: int = 0, refuses: str | None = None) -> None:
        self.name, self.calls, self.ends_after, self.refuses = name, calls, ends_after, refuses
        self.seen: list[list[str]] = []

    def begin(self) -> None:
        self.calls.append(f"begin {self.name}")

    def on_step_begin(self, iteration: int) -> None:
        self.calls.append(f"on_step_begin {self.name}")

    def judge(self, loss: float, norm: float | None) -> str | None:
        return self.refuses

    def measure(self, step: Any) -> dict[str, float]:
        self.calls.append(f"measure {self.name}")
        return {self.name: float(step.iteration)}

    def on_step_end(self, step: Any) -> None:
        self.calls.append(f"on_step_end {self.name}")
        self.seen.append(sorted(step.record))

    def ends(self, step: Any) -> BaseException | None:
        return ValueError(self.name) if step.iteration == self.ends_after else None

    def finish(self, iteration: int, end: BaseException | None) -> BaseException | None:
        self.calls.append(f"finish {self.name}")
        return end


def hooks_of(*ordered: RankHook) -> Hooks:
    unused: Any = None
    return Hooks(ordered, unused, unused)


def run_of(*, last: int) -> Any:
    config = SimpleNamespace(train=SimpleNamespace(train_iters=last))
    return SimpleNamespace(config=config, position=SimpleNamespace(iteration=0))


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    step = lambda run, iteration, hooks: SimpleNamespace(iteration=iteration, record={"iteration": iteration})  # noqa: E731
    monkeypatch.setattr(loop, "take_step", step)


def test_each_method_is_called_on_all_hooks_before_the_next() -> None:
    calls: list[str] = []
    first, second = Noted("a", calls), Noted("b", calls)
    assert loop._train(run_of(last=1), hooks_of(first, second)) == (1, None)
    forward = [f"{method} {name}" for method in METHODS[:-1] for name in "ab"]
    assert calls == [*forward, "finish b", "finish a"]
    assert first.seen == [["a", "b", "iteration"]], "the record is complete before anybody is told"


def test_the_first_hook_with_a_reason_ends_the_run() -> None:
    calls: list[str] = []
    hooks = hooks_of(Noted("a", calls, ends_after=3), Noted("b", calls, ends_after=2), Noted("c", calls, ends_after=2))
    iteration, end = loop._train(run_of(last=5), hooks)
    assert (iteration, str(end)) == (2, "b")


def test_the_first_refusal_of_a_step_is_heard() -> None:
    hooks = hooks_of(Noted("a", []), Noted("b", [], refuses="a spike"), Noted("c", [], refuses="another"))
    assert hooks.judge(1.0, 2.0) == "a spike"
    assert hooks_of(Noted("a", [])).judge(1.0, None) is None


@pytest.mark.parametrize(
    ("began", "epochs", "said"),
    [
        (0, None, "finished"),
        (79, None, "finished"),
        (80, None, "the checkpoint is of iteration 80 and --train-iters ends at 80; raise --train-iters"),
        (100, 2.0, "the checkpoint is of iteration 100 and --epochs ends at 80; raise --epochs"),
    ],
)
def test_a_run_says_why_it_trained_nothing(began: int, epochs: float | None, said: str) -> None:
    train = SimpleNamespace(train_iters=80, epochs=epochs)
    run: Any = SimpleNamespace(position=SimpleNamespace(iteration=began), config=SimpleNamespace(train=train))
    told = loop._ended(run, max(80, began))
    assert said in told
    assert ("nothing was trained" in told) == (began >= 80)


def drawn(rates: Rates, *, noise: float) -> list[TimedLayer]:
    random = np.random.default_rng(1)
    samples = []
    for products, attention, traffic, calls in random.uniform((1e8, 0, 1e6, 1), (1e10, 2e9, 5e8, 20), (30, 4)):
        layer = TimedLayer(products, attention, traffic, calls, 1.0)
        samples.append(replace(layer, seconds=predicted(layer, rates) * random.uniform(1 - noise, 1 + noise)))
    return samples


def test_exact_times_give_the_rates_back() -> None:
    rates = Rates(6e10, 3e10, 4e9, 1e-4)
    assert vars(fit(drawn(rates, noise=0))) == pytest.approx(vars(rates), rel=1e-6)


def test_what_costs_nothing_is_not_negative() -> None:
    samples = drawn(Rates(6e10, 3e10, 1e18, 0.0), noise=0.05)
    found = fit(samples)
    assert min(vars(found).values()) >= 0
    assert max(abs(predicted(s, found) / s.seconds - 1) for s in samples) < 0.15


def test_attention_is_never_faster_than_products() -> None:
    """Times in which attention seems to cost nothing, as noise makes it: it is products at least."""
    found = fit(drawn(Rates(6e10, 1e18, 4e9, 1e-4), noise=0.05))
    assert found.attention == found.matmul < 1e11


def test_products_are_not_faster_than_the_device() -> None:
    """Times that memory and calls explain whole, as those of a GPU's layers, of which both are proportional."""
    samples = drawn(Rates(1e18, 1e18, 4e9, 1e-4), noise=0)
    assert fit(samples).matmul > 1e14
    found = fit(samples, peak=1e13)
    assert found.matmul <= 1e13
    assert max(abs(predicted(s, found) / s.seconds - 1) for s in samples) < 0.2


PIXELS, OUTPUT, GRADIENT = range(3)
LAYERS = 5


def norms(odd: dict[tuple[int, int], float]) -> list[tuple[DataPlace, float]]:
    """Of two replicas with two micro-batches each, of which the second of replica 1 differs by factors of `odd`."""
    return [
        (place, (1.0 + depth) * (odd.get((kind, depth), 1.0) if (replica, micro) == (1, 1) else 1.0 + 0.1 * micro))
        for replica in range(2)
        for micro in range(2)
        for kind in (OUTPUT, GRADIENT)
        for depth in range(LAYERS)
        for place in [DataPlace(kind, depth, micro, rank=replica, replica=replica)]
    ]


def test_a_layer_that_multiplies_gradients_is_where_they_begin_to_stand_out() -> None:
    odd = {(GRADIENT, depth): 1e6 for depth in (3, 4)} | {(GRADIENT, 2): 20.0}
    assert standing_out(norms(odd)) == (DataPlace(GRADIENT, 3, 1, 1, 1), 1e6)


def test_unusual_samples_are_no_layer_s_fault() -> None:
    found = standing_out(norms({(GRADIENT, depth): 40.0 for depth in range(1, LAYERS)}))
    assert found == (DataPlace(GRADIENT, 1, 1, 1, 1), 40.0)


@pytest.mark.parametrize("odd", [{}, {(GRADIENT, depth): 2.0 for depth in range(LAYERS)}])
def test_where_all_micro_batches_are_alike_nobody_is_named(odd: dict[tuple[int, int], float]) -> None:
    assert standing_out(norms(odd)) is None
    assert standing_out([]) is None


def test_a_rewind_loads_as_a_start_does(tmp_path: Path, monkeypatch: Any) -> None:
    """It takes the checkpoint before a damaged one, and as long as it needs: it comes between steps, where ten of them
    without progress are a hang.
    """
    phases = Phases()
    phases.begin_step(6)
    phases.end_step()
    seen: list[str] = []

    def load(_: Any, folder: Path, **__: Any) -> Position:
        seen.append(phases.now.phase)
        if folder.name == "iter_0000003":
            raise Damaged("a flipped bit")
        return Position(2, {})

    for iteration in (2, 3):
        committed(tmp_path / "checkpoints", iteration, {"state.json": "{}", "megavlm.json": "{}"})
    monkeypatch.setattr(step_guard.state, "load", load)
    monkeypatch.setattr(step_guard, "from_rank_0", lambda action, _: action())
    monkeypatch.setattr(reading, "on_rank_0", lambda action: action())
    monkeypatch.setattr(reading, "of_all_ranks", lambda value: [value])
    said: list[str] = []
    engine = SimpleNamespace(schedule=SimpleNamespace(phases=phases), trained=lambda: None)
    run: Any = SimpleNamespace(
        config=parse([]), engine=engine, plan=None, position=Position(0, {}), progress=None, run_dir=tmp_path,
        saver=None, say=said.append,
    )  # fmt: skip
    step_guard.StepGuard(run)._rewind(6)
    assert [PATIENCE[phase] for phase in seen] == [86400.0, 86400.0]
    assert "iter_0000003 is damaged: a flipped bit" in said[0]
    assert "iter_0000002" in said[1]
    assert phases.now.phase == OTHER


def test_a_profiler_may_write_for_longer_than_a_step(tmp_path: Path, monkeypatch: Any) -> None:
    phases = Phases()
    phases.begin_step(12)
    seen: list[str] = []
    averages = type("Averages", (list,), {"table": lambda self, **_: seen.append(phases.now.phase) or ""})
    profiler = SimpleNamespace(
        __exit__=lambda *_: None, export_chrome_trace=lambda _: seen.append(phases.now.phase), key_averages=averages
    )
    monkeypatch.setattr(trace, "dist", SimpleNamespace(get_rank=lambda: 0))
    engine = SimpleNamespace(schedule=SimpleNamespace(phases=phases), name_phases=lambda labelled: None)
    run: Any = SimpleNamespace(config=parse(["--profile"]), engine=engine, run_dir=tmp_path, say=lambda text: None)
    hook = trace.Trace(run)
    hook._profiler = profiler
    step: Any = SimpleNamespace(iteration=12)
    assert hook.measure(step) == {}
    phases.end_step()
    assert [PATIENCE[phase] for phase in seen] == [1800.0] * 2
    assert phases.now.phase == OTHER


FILES = ["--tokenizer", "tokenizer", "--datasets", "a.json", "--chat-template", "chatml", "--seq-length", "64"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    write_tokenizer(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    return FILES


def test_it_is_that_of_the_source(files: list[str], tmp_path: Path) -> None:
    demo, given, unset = parse(["--recipe", "demo"]), parse(["--set", "model.language.vocab_size=97"]), parse([])
    digits = DigitsSource.build(demo, run_dir=tmp_path, rank=0, barrier=lambda: None)
    for config, source in (
        (demo, digits),
        (given, SyntheticSource(given)),
        (unset, SyntheticSource(unset)),
        (parse(files), FilesSource(parse(files))),
    ):
        assert vocab_size_of(config) == source.vocab_size
    with pytest.raises(UserError, match="need a tokenizer"):
        vocab_size_of(parse(["--datasets", "a.json"]))
    with pytest.raises(UserError, match="--seq-length 17 is too short"):
        vocab_size_of(parse(["--seq-length", "17", "--set", "model.language.vocab_size=97"]))


def test_a_tokenizers_size_is_planned_and_counted(files: list[str]) -> None:
    """As if the option had said it: counted as 256 tokens, the last stage had too many layers."""
    dims = Dims(tp=1, pp=4, vpp=1, dp=1)
    size = vocab_size_of(parse(files))
    known = resolve(parse(files), vocab_size=size)
    said = resolve(parse([*files, "--set", f"model.language.vocab_size={size}"]))
    assert make_plan(known, dims) == make_plan(said, dims)
    assert size != 256
    work = typical_workload(known)
    fewer = step_flops(resolve(parse([*files, "--set", f"model.language.vocab_size={size - 1}"])), work)
    assert step_flops(known, work) - fewer == 6 * work.tokens * known.model.language.hidden_size
    with pytest.raises(AssertionError, match=r"config\.resolve"):
        make_plan(resolve(parse(files)), dims)


@pytest.mark.parametrize(("multiple", "length"), [(1, 20), (3, 21), (32, 32)])
def test_a_token_costs_few_positions(multiple: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequence parallelism shards them, and FP8 takes multiples of 16 on each rank."""
    monkeypatch.setattr(generate, "_interleave", lambda engine, mine, *, total: mine)
    shapes = []

    def logits(batches: list[MicroBatch]) -> list[Tensor]:
        shapes.extend(tuple(batch.text.tokens.shape) for batch in batches)
        scores = torch.zeros(2, 1, 256)
        scores[..., 7] = 1
        return [scores] * len(batches)

    engine, spec, prompts = _asked(logits, multiple)
    assert generate.generate(engine, spec, prompts, micro_batch_size=2, max_new_tokens=3) == [[7] * 3] * 2
    assert shapes == [(2, length), (2, multiple), (2, multiple)]


def test_answers_are_given_up_with_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate.dist, "all_reduce", lambda flags, op: None)
    passes = []

    def logits(batches: list[MicroBatch]) -> list[Tensor]:
        passes.append(1)
        return [torch.eye(256)[None, 7:8].repeat(2, 1, 1)] * len(batches)

    engine, spec, prompts = _asked(logits, 1)
    with pytest.raises(generate.GivenUp):
        generate.generate(
            engine, spec, prompts, micro_batch_size=2, max_new_tokens=9, stop=[8], give_up=lambda: len(passes) == 3
        )
    assert len(passes) == 3


def _asked(logits: Any, multiple: int) -> tuple[Any, CollateSpec, list[Sample]]:
    config = parse(["--seq-length", "32", "--images-per-sample", "0"])
    source = SyntheticSource(config)
    spec = CollateSpec.of(config, source)
    prompts = [source.sample(index) for index in range(2)]
    prompts = [replace(sample, tokens=sample.tokens[:20], trained=sample.trained[:20]) for sample in prompts]
    engine: Any = SimpleNamespace(
        groups=SimpleNamespace(coords=SimpleNamespace(dp=0), dims=SimpleNamespace(dp=1, pp=1, tp=1)),
        sequence_multiple=multiple,
        schedule=SimpleNamespace(logits=logits, backend=SimpleNamespace(device="cpu")),
    )
    return engine, spec, prompts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    values = torch.randn(33, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = torch.int32 if dtype is torch.float32 else torch.int16
    for bit in range(torch.iinfo(whole).bits - 1):
        other = values.clone()
        other.view(whole)[7, 3] ^= 1 << bit
        assert checksum(other) != checksum(values), bit


def test_the_minority_differs() -> None:
    assert minority([5, 5, 5]) == []
    assert minority([5, 6, 5]) == [1]
    assert minority([5, 6]) == [0, 1]
    assert minority([1, 2, 3, 1]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("make", "said"),
    [(lambda path: path.symlink_to("/mnt/gone"), "/mnt/gone, which is not there"), (Path.touch, "no folder")],
)
def test_checkpoints_that_are_out_of_reach_end_the_run(tmp_path, make, said):
    make(tmp_path / "checkpoints")
    with pytest.raises(UserError, match=said):
        make_run_dir(tmp_path)


def test_a_checkpoint_from_a_store_gets_the_files_of_an_export_anew(tmp_path: Path, monkeypatch: Any) -> None:
    """A new machine has only the checkpoint. Without the files of the Hugging Face folder it could not be exported."""
    monkeypatch.setattr(run_dir, "_write_sidecars", lambda folder, *_: (folder / "hf").mkdir())
    (checkpoint := tmp_path / "checkpoints/iter_0000002").mkdir(parents=True)
    run_dir.write_sidecars(tmp_path, parse([]), checkpoint, image_token=0)
    assert (tmp_path / "hf").is_dir()
