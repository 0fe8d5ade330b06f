"""Each recipe is a run that fits, in the fastest layout or why not; pages show what scripts of benchmarks say today."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import what_fits
import yaml

import recipes
from megavlm.arch.kinds import layer_cost, model_parameters, step_flops
from megavlm.arch.layers import layer_names
from megavlm.arch.workload import typical_workload
from megavlm.command_line.configuration import configured
from megavlm.config.derived import starts_from
from megavlm.config.messages import several
from megavlm.data.survey import DEAR
from megavlm.errors import UserError
from megavlm.programs.train import train
from tests.support.covering import slow

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes").glob("*.yaml"))
# Options that a recipe must say, because their defaults are for toys or differ with the kind of run.
EXPLICIT = {
    "model": {"freeze"},
    "parallel": {"data_parallel_sharding"},
    "execution": {"recompute_granularity"},
    "precision": {"dtype"},
    "train": {"micro_batch_size", "global_batch_size", "seq_length", "train_iters"},
    "optimizer": {"lr", "lr_decay_style", "lr_warmup_iters", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad"},
    "checkpoint": {"save_interval"},
}


def test_there_are_recipes() -> None:
    assert len(FILES) >= 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_is_a_run_that_fits(path: Path) -> None:
    text, data = path.read_text(), yaml.safe_load(path.read_text())
    for section, names in EXPLICIT.items():
        assert names <= set(data[section]), f"{section} of {path.name} leaves {names - set(data[section])} out"
    # Every value outside of the layout has a source or says that it is ours.
    for line in text.partition("\ntrain:\n")[2].partition("\ndata:\n")[0].splitlines():
        if line.startswith("  ") and "micro_batch_size" not in line:
            assert re.search(r"# .*(\[\d\]|ours)", line), f"{path.name}: {line} names no source"
    for number in set(re.findall(r"(?<!: )\[(\d)\]", text)):
        assert f"# [{number}] " in text
    recipe = recipes.read(path)
    assert recipe.peak <= recipe.hardware.memory
    assert recipes.said(path).startswith(f"{recipes.MARK}{recipe.own_line}; "), "python benchmarks/recipes.py --write"
    assert re.search(r"^# layout: .{10,}$", text, flags=re.MULTILINE), "say why this layout"


OF_EACH_START = ("llava_1_5_7b_stage2", "qwen2_5_vl_7b_lora_8gpu", "vlm_13b")  # parts, a folder, random weights


@pytest.mark.parametrize(
    "path", [path if path.stem in OF_EACH_START else slow(path) for path in FILES], ids=lambda path: path.stem
)
def test_the_command_of_a_recipe_is_for_its_own_model(path, capsys, monkeypatch, tmp_path):
    """What a user types, with nothing in the hub's cache: a dry run has a verdict, and no other model is trained."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    recipe, argv = recipes.read(path), ["--config", str(path), "--run-dir", str(tmp_path / "run")]
    configured(argv, world=recipe.gpus)
    train([*argv, "--dry-run"])
    first, *lines = capsys.readouterr().out.splitlines()
    count = sum(model_parameters(name, recipe.config.model) for name in layer_names(recipe.config.model))
    places = starts_from(recipe.config)
    assert first.startswith(f"weights of {' and '.join(places.values())}" if places else "random weights")
    assert f", {count:,} parameters" in first
    gib = f"{recipe.peak / 2**30:.2f} GiB of {recipe.hardware.memory / 2**30:.2f} GiB"
    assert lines[-1] == f"fits: {gib} on the fullest of {several(recipe.gpus, 'rank')} ({recipe.hardware.name})"
    if not places:
        return
    with pytest.raises(UserError) as refused:
        train(argv)
    assert "hf download" in str(refused.value) or path.stem == "llava_1_5_7b_stage2"
    without = [word for option in places for word in (option, "none")]
    assert f"{' '.join(without)} begins with random weights of that size" in str(refused.value)
    train([*argv, *without, "--dry-run"])
    assert capsys.readouterr().out.startswith(f"random weights, {count:,} parameters")


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_fastest_layout_is_taken_or_named(path: Path) -> None:
    assert recipes.said(path) == f"{recipes.MARK}{recipes.read(path).line()}", "python benchmarks/recipes.py --write"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_validation_with_every_checkpoint_takes_3_percent_of_an_epoch(path: Path) -> None:
    """An epoch is as long as the recipe; a hundredth of its samples is held out, of pretraining a thousandth."""
    config, held_out = recipes.read(path).config, 0.001 if path.stem.startswith("vlm_") else 0.01
    times = -(-config.train.train_iters // config.checkpoint.save_interval)
    work = typical_workload(config)
    forward = sum(layer_cost(name, config.model, work).forward_flops for name in layer_names(config.model))
    assert times * held_out * forward / step_flops(config, work) <= DEAR


SAMPLED = (
    "qwen2_5_vl_7b h100 8192 full",
    "smolvlm_2b a100 2048 LoRA",
    "llava_1_5_7b b200 2048 frozen tower",
    "qwen2_5_vl_7b h200 16384 full 64 frames",
)


@pytest.mark.parametrize(
    ("script", "row"),
    [
        ("claims", "| claim | claimed | predicted | verdict |"),
        ("predict_gpu", "| LLaVA-1.5-7B, H100, ms |"),
        ("recipes", "| `internvl3_8b` |"),
        ("schedules", "| PP4 m=16 frozen tower |"),
        pytest.param("strategies", "| 175B, 256 |", marks=pytest.mark.slow),
        ("what_fits", "| `smolvlm_2b` |"),
    ],
)
def test_the_page_of_a_script_is_what_it_says_today(script: str, row: str) -> None:
    program = importlib.import_module(script)
    text = program.DOCUMENT.read_text(encoding="utf-8")
    assert row in text
    assert program.documented(text) == text, f"renew it: python benchmarks/{script}.py --write"


def test_the_rows_of_what_fits_are_all_there_are() -> None:
    assert what_fits.rows(what_fits.known()) == what_fits.ROWS.read_text(encoding="utf-8")
    assert len(what_fits.known()) == len(list(what_fits.cases(list(what_fits.MODELS)))) == 480


@pytest.mark.parametrize("key", SAMPLED)
def test_a_sample_of_what_fits_is_what_the_planner_says(key: str) -> None:
    (case,) = (each for each in what_fits.cases(list(what_fits.MODELS)) if each.key == key)
    kept, now = what_fits.known()[key], what_fits.answer(case)
    assert (now.gpus, now.layout) == (kept.gpus, kept.layout)
    assert now.rate == pytest.approx(kept.rate, rel=1e-6)
