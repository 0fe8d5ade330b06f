"""Grids: which variants there are, their names and flags, and what is refused in one line before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megavlm.command_line.parsing import parse
from megavlm.errors import UserError
from megavlm.programs.launch.job import Children, Command, Job
from megavlm.programs.sweep import sweep, training
from megavlm.programs.sweep.grid import Grid, Variant, read_grid, variants_of
from megavlm.programs.sweep.sweep import results
from megavlm.programs.sweep.training import note_flags, run_dir_of, state_of, to_train
from megavlm.resilience.events import write_status

FLAGS = "--recipe demo --train-iters 4"


def grid_of(folder: Path, **values: object) -> Grid:
    file = folder / "grid.yaml"
    file.write_text(yaml.safe_dump({"run_dir": str(folder / "runs"), "flags": FLAGS, **values}))
    return read_grid(file)


def named(folder: Path, **values: object) -> dict[str, tuple[str, ...]]:
    return {each.name: each.flags for each in variants_of(grid_of(folder, **values))}


def test_each_combination_is_a_variant(tmp_path: Path):
    found = named(tmp_path, product={"lr": [0.001, 0.0003], "tp": [1, 2]}, seeds=[1, 2])
    assert len(found) == 8
    assert found["lr-0.0003_tp-2_seed-1"] == (
        *FLAGS.split(),
        *"--lr 0.0003 --tp 2 --seed 1 --run-dir".split(),
        str(tmp_path / "runs/lr-0.0003_tp-2_seed-1"),
    )


def test_entries_of_a_list_have_names_of_their_own_and_join_the_product(tmp_path: Path):
    entries = [
        {"name": "frozen", "freeze": ["vision", "projector"]},
        {"sequence_parallel": False, "vision-cache": None},
    ]
    found = named(tmp_path, list=entries, product={"lr": [1]})
    assert list(found) == ["frozen_lr-1", "sequence_parallel-off_vision-cache-none_lr-1"]
    assert found["frozen_lr-1"][4:9] == ("--freeze", "vision", "projector", "--lr", "1")
    assert "--no-sequence-parallel --vision-cache none --lr 1" in " ".join(list(found.values())[1])
    assert list(named(tmp_path)) == ["base"]


def test_a_key_of_a_section_is_set(tmp_path: Path):
    found = named(tmp_path, product={"model.language.qk_norm": [True], "model.vision.full_attention_layers": [[1, 3]]})
    (words,) = found.values()
    config = parse(words)
    assert config.model.language.qk_norm is True
    assert config.model.vision.full_attention_layers == (1, 3)


MISTAKES: list[tuple[dict[str, object], str]] = [
    ({"produkt": {"lr": [1]}}, "grid has no produkt: did you mean product"),
    ({"product": {"lr": 1}}, "grid: product must be options with lists of values"),
    ({"seeds": 3}, "grid seeds expects a list of integers, got 3"),
    ({"mode": "least"}, "grid mode expects one of min, max"),
    ({"processes": 0}, "grid processes 0 must be at least 1"),
    ({"run_dir": "gs://bucket/runs"}, "grid: run_dir must be a folder of this machine"),
    ({"flags": "--recipe demo --run-dir x"}, "grid: it sets --run-dir"),
    ({"product": {"run_dir": ["x"]}}, "grid: it sets --run-dir"),
    ({"product": {"run.run_dir": ["x"]}}, "grid: it sets --run-dir"),
    ({"flags": "--recipe demo --set run.run_dir=x"}, "grid: it sets --run-dir"),
    ({"list": [{"--run-dir": "x"}]}, "grid: it sets --run-dir"),
    ({"flags": "--recipe 'demo"}, "grid: flags cannot be read"),
    ({"list": [{"name": "a"}, {"name": "a", "tp": 2}]}, "two variants are called a"),
    ({"product": {"seed": list(range(1001))}}, "1001 variants are more than 1000"),
    ({"product": {"learning_rat": [1]}}, "variant learning_rat-1: unknown option --learning-rat"),
    ({"product": {"tp": [1, 2, 3]}, "processes": 2}, "variant tp-3: "),
    ({"nodes": 2}, "grid: nodes 2 need --on slurm"),
    ({"argv": ["--image", "x.sif"]}, "--image needs --on slurm"),
]


@pytest.mark.parametrize(("values", "line"), MISTAKES, ids=[line for _, line in MISTAKES])
def test_a_mistake_is_one_line_before_anything_starts(
    values: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "grid.yaml"
    argv, grid = values.get("argv", []), {name: value for name, value in values.items() if name != "argv"}
    file.write_text(yaml.safe_dump({"run_dir": str(tmp_path / "runs"), "flags": FLAGS, **grid}))
    assert sweep.main([str(file), *argv]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert line in told
    assert not (tmp_path / "runs").exists()


def ended(variant: Variant, state: str, *losses: float) -> None:
    """Write what a run of so many iterations leaves behind."""
    run_dir = run_dir_of(variant)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_status(run_dir, state, iteration=len(losses))  # type: ignore[arg-type]
    records = [{"iteration": i + 1, "loss": loss, "tokens_per_second": 100.0} for i, loss in enumerate(losses)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_what_finished_is_skipped_and_what_failed_is_started_on_request(tmp_path: Path):
    variants = variants_of(grid_of(tmp_path, product={"lr": [1, 2, 3, 4]}))
    for variant, state in zip(variants, ("finished", "failed", "stopped"), strict=False):
        ended(variant, state, 1.0)
    assert [state_of(each) for each in variants] == ["finished", "failed", "stopped", "to do"]
    assert [each.name for each in to_train(variants, retry_failed=False)] == ["lr-3", "lr-4"]
    assert [each.name for each in to_train(variants, retry_failed=True)] == ["lr-2", "lr-3", "lr-4"]
    ended(variants[3], "running", 1.0)  # killed: nobody touches its lock
    (run_dir_of(variants[3]) / "lock").touch()
    assert state_of(variants[3]) == "running"
    (run_dir_of(variants[3]) / "lock").unlink()
    assert state_of(variants[3]) == "to do"


def test_a_variant_that_began_with_other_options_is_refused(tmp_path: Path):
    folder = tmp_path / "runs"
    before = variants_of(grid_of(tmp_path, product={"lr": [1, 2]}))
    note_flags(folder, before)
    after = variants_of(grid_of(tmp_path, product={"lr": [1, 2]}, flags="--recipe demo --train-iters 9"))
    note_flags(folder, after)  # none has begun
    ended(after[1], "finished", 1.0)
    with pytest.raises(ValueError, match=r"variant lr-2 began with other options \(4 9\): give the grid another"):
        note_flags(folder, before)


def test_a_metric_that_no_record_has_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for metric, told in (
        ("los", "warning: no record has the metric los: did you mean loss?"),
        ("loss", "best by loss"),
    ):
        grid = grid_of(tmp_path, product={"lr": [1]}, metric=metric)
        ended(*variants_of(grid), "finished", 1.0)
        sweep.report(grid, variants_of(grid))
        assert told in capsys.readouterr().out
        ended(*variants_of(grid), "running")
        sweep.report(grid, variants_of(grid))
        assert "warning" not in capsys.readouterr().out


def test_the_table_has_means_over_seeds_and_the_best(tmp_path: Path):
    grid = grid_of(tmp_path, list=[{"name": "a", "lr": 1}, {"name": "b", "lr": 2}], seeds=[1, 2], average_last=2)
    variants = variants_of(grid)
    for variant, last in zip(variants, (1.0, 3.0, 0.5, 0.7), strict=True):
        ended(variant, "finished", 9.0, last + 0.1, last - 0.1)
    (head, first, second), best = results(grid, variants)
    assert head == ["variant", "lr", "state", "iteration", "loss", "± over seeds", "tokens/s"]
    assert first == ["a", "1", "finished", "3", "2", "1.4142", "100"]
    assert second[:5] == ["b", "2", "finished", "3", "0.6"]
    assert best == "b"
    ended(variants[2], "failed", 9.0)
    (_, _, second), best = results(grid, variants)
    assert second[2] == "1 failed, 1 finished"
    assert best == "a"  # the mean of one seed is no mean of two


def test_an_array_job_is_one_command(tmp_path: Path):
    grid = grid_of(tmp_path, product={"lr": [1, 2, 3]}, nodes=2, processes=4)
    variants = variants_of(grid)
    command = training.array_command(grid, variants[1:], ["--time=60"], parallel=2, profile="infiniband")
    folder = tmp_path / "runs"
    assert command.words == (
        *("sbatch", "--nodes=2", "--gpus-per-node=4", "--array=0-1%2", f"--output={folder}/%A_%a.out"),
        *("--time=60", "launch/slurm.sbatch"),
    )
    flags = Path(command.environment["MEGAVLM_ARRAY"])
    assert flags.parent == folder / "array"
    assert flags != training.flags_folder(grid, variants), "an array that waits keeps its own"
    assert Job(2, 4, ()).world == grid.world
    training.write_flags(grid, variants[1:])
    assert (flags / "1").read_text().endswith(f"--lr\x003\0--run-dir\0{folder}/lr-3\0")


def test_variants_beside_one_another_have_gpus_of_their_own(tmp_path: Path, monkeypatch):
    grid = grid_of(tmp_path, product={"lr": [1, 2, 3]}, processes=2)
    monkeypatch.setattr(training, "gpus_here", lambda: ["4", "5", "6"])
    with pytest.raises(UserError, match="--parallel 2 variants of 2 processes need 4 GPUs, and 3 are here"):
        training.train_here(grid, variants_of(grid), parallel=2, say=print)
    monkeypatch.setattr(training, "gpus_here", lambda: ["4", "5", "6", "7"])
    given, said = [], []

    class Told(Children):
        """Starts a shell in place of a run; the second one fails, and the third comes once a slot is free."""

        def start(self, command: Command, **more: Any) -> Any:
            given.append(command.environment["CUDA_VISIBLE_DEVICES"])
            assert command.words[7:10] == ("--profile", "nvlink", "--")
            return super().start(Command(("sh", "-c", f"sleep 0.{len(given)}; exit {int(len(given) == 2)}")), **more)

    monkeypatch.setattr(training, "Children", Told)
    profile = ("--profile", "nvlink")
    assert training.train_here(grid, variants_of(grid), parallel=2, say=said.append, profile=profile) == 1
    assert given == ["4,5", "6,7", "4,5"]
    assert said[:2] == ["1 of 3: lr-1 finished", "2 of 3: lr-2 failed with 1: see its .out file"]
    Told.asked = True  # nothing starts after a signal
    monkeypatch.setattr(Told, "__init__", lambda self: setattr(self, "_before", {}))
    assert training.train_here(grid, variants_of(grid), parallel=2, say=print) == 75
    assert len(given) == 3
