"""Given weights get the defaults of a fine-tune, random ones those of a toy; what the user gave always wins."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megavlm.checkpoint.begun import as_begun
from megavlm.command_line.parsing import parse
from megavlm.config.lora_config import beyond_adapters, frozen_parts
from megavlm.config.schema import Config
from megavlm.rules.check import check
from megavlm.rules.defaults import START_DEFAULTS, resolve, start_table, with_start_defaults
from megavlm.rules.fields import value_at
from megavlm.rules.load import to_yaml

KEYS = [default.option for default in START_DEFAULTS]
TOY = [(), "fp32", 1e-3, None, None, None, 0, 64, 0, None]


def values(config: Config) -> list[object]:
    return [value_at(config, key.split(".")) for key in KEYS]


def begun(folder: Path, config: Config) -> Path:
    """Write what a run with this configuration leaves, as far as it is read here."""
    (folder / "checkpoints/iter_0000005").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder


@pytest.mark.parametrize(
    ("flags", "lr", "vision", "projector", "language"),
    [
        ("--init-from F", 1e-5, 2e-6, None, None),
        ("--load F", 1e-5, 2e-6, None, None),
        ("--init-from F --freeze vision", 1e-5, None, None, None),
        ("--init-from F --freeze vision language", 1e-3, None, None, None),
        ("--init-from F --lora-rank 8 --lora-targets language vision --freeze projector", 1e-4, None, None, None),
        ("--init-from F --lora-rank 8 --lora-targets language --freeze vision", 1e-4, None, 2e-5, None),
        ("--init-from F --lora-rank 8 --lora-targets vision --freeze none", 1e-4, None, 2e-5, 2e-5),
        ("--init-from F --lora-rank 8 --lora-targets vision", 1e-4, None, None, None),
        ("--vision-from V --language-from L --lora-rank 8", 1e-4, None, 1e-3, None),
        ("--language-from L", 1e-5, 2e-6, 1e-3, None),
        ("--vision-from V --language-from L --freeze vision language", 1e-3, None, None, None),
        ("--init-from F --lr 3e-4", 3e-4, None, None, None),
        ("--init-from F --vision-lr 1e-7", 1e-5, 1e-7, None, None),
    ],
)
def test_learning_rates_of_given_weights(flags, lr, vision, projector, language):
    config = parse([*flags.split(), "--train-iters", "1000"])
    found = resolve(config)
    assert values(found)[1:] == ["bf16", lr, vision, projector, language, 30, 8192, 500, None]
    assert resolve(found) == found
    check(config, world=1)
    check(found, world=1)


@pytest.mark.parametrize(
    ("flags", "rate"), [("", 1e-3), ("--load F", 0.0), ("--load F --moe-router-bias-update-rate 1e-3", 1e-3)]
)
def test_a_bias_of_given_weights_stays(flags: str, rate: float) -> None:
    mixture = (
        "--num-experts 4 --set model.experts.router_score_function=sigmoid model.experts.router_enable_expert_bias=true"
    )
    config = parse([*mixture.split(), *flags.split()])
    assert resolve(config).model.experts.router_bias_update_rate == rate
    assert f"{rate:g}" in start_table(config)
    check(config, world=1)


def test_random_weights_keep_the_defaults_of_a_toy() -> None:
    assert values(resolve(parse([]))) == TOY
    assert values(resolve(parse(["--freeze", "vision", "language"])))[1:] == TOY[1:]


def test_what_is_given_wins_also_where_it_is_the_default_of_a_toy() -> None:
    given = "--precision fp32 --lr 1e-3 --lr-warmup-iters 0 --seq-length 64 --save-interval 0"
    assert values(resolve(parse(["--init-from", "F", *given.split()]))) == TOY


def test_a_run_that_continues_keeps_what_it_began_with(tmp_path: Path) -> None:
    """What it wrote wins over the table, here the values of a toy."""
    run = begun(tmp_path / "run", with_start_defaults(Config()))
    command = ["--init-from", "F", "--run-dir", str(run)]
    assert values(resolve(as_begun(parse(command)))) == TOY
    assert values(resolve(as_begun(parse([*command, "--lr", "5e-5"]))))[2] == 5e-5
    assert "as this run began" in start_table(as_begun(parse(command)), asked=parse(command))
    for loaded in (run, run / "checkpoints/iter_0000005"):
        other = ["--load", str(loaded), "--run-dir", str(tmp_path / "other")]
        assert values(resolve(as_begun(parse(other)))) == TOY
    assert values(resolve(parse(command)))[2] == 1e-5, "the test can fail"


@pytest.mark.parametrize("weight", [None, 1.0])
def test_a_run_goes_on_with_the_weights_of_its_data_sets(tmp_path: Path, weight: float | None) -> None:
    config = parse(["--datasets", "a.json", "b.json", "--run-dir", str(tmp_path)])
    weighted = tuple(replace(each, weight=weight) for each in config.data.datasets)
    begun(tmp_path, replace(config, data=replace(config.data, datasets=weighted)))
    assert as_begun(config).data.datasets == weighted
    other = parse(["--datasets", "a.json,weight=3", "c.json", "--run-dir", str(tmp_path)])
    assert as_begun(other).data == other.data


@pytest.mark.parametrize(
    ("flags", "frozen"),
    [
        ("", ()),
        ("--lora-rank 4", ("vision", "projector")),
        ("--lora-rank 4 --lora-targets q_proj", ("projector",)),
        ("--lora-rank 4 --lora-targets vision.layers.0", ("projector", "language")),
        ("--lora-rank 4 --freeze none", ()),
        ("--lora-rank 4 --freeze vision", ("vision",)),
        ("--lora-rank 4 --vision-from V --language-from L", ("vision",)),
        ("--lora-rank 4 --vision-from V --language-from L --projector-from P", ("vision", "projector")),
    ],
)
def test_adapters_train_alone_unless_asked(flags: str, frozen: tuple[str, ...]) -> None:
    """As with ms-swift and LLaMA-Factory; but a projector of random weights has to be trained."""
    for start in ("", "--load F"):
        config = parse(f"{flags} {start}".split())
        assert frozen_parts(config) == frozen
        assert resolve(config).model.freeze == frozen


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--freeze vision", "the adapters, projector trains whole, .*: use --freeze vision projector, or"),
        ("--lora-targets vision --freeze none", "projector and language train .*: use --freeze projector language,"),
        ("--vision-from V --language-from L", "projector trains whole, .*: use --freeze vision projector, or"),
        ("--freeze vision projector", None),
        ("", None),
    ],
)
def test_what_adapters_do_not_hold_is_said_before_the_training(flags: str, told: str | None) -> None:
    warning = beyond_adapters(parse(["--lora-rank", "4", *flags.split()]))
    assert (warning is None) if told is None else re.search(told, warning or "")


def test_the_table_tells_where_each_value_comes_from() -> None:
    lines = start_table(parse("--init-from F --seq-length 512 --lora-rank 8 --freeze vision".split())).splitlines()
    table = {line.split()[0]: line for line in lines}
    assert table["--seq-length"].endswith("512  given")
    assert "0.0001  default for given weights: published for LoRA adapters" in table["--lr"]
    assert "2e-05" in table["--projector-lr"]
    assert "--vision-lr" not in table
    assert all("default for random weights" in line for line in start_table(Config()).splitlines())


def test_a_new_rate_of_a_resumed_run_holds_for_all_parts(tmp_path: Path) -> None:
    command = ["--init-from", "F", "--run-dir", str(tmp_path)]
    begun(tmp_path, with_start_defaults(parse(command)))
    assert resolve(as_begun(parse(command))).optimizer.vision_lr == 2e-6
    assert resolve(as_begun(parse([*command, "--lr", "5e-5"]))).optimizer.vision_lr is None


def test_a_warm_up_by_its_fraction_has_no_default_beside_it() -> None:
    """RUN_DIR/config.yaml would hold both, and the resumed run would be refused."""
    written = with_start_defaults(parse("--init-from F --train-iters 100 --lr-warmup-fraction 0.1".split()))
    assert written.optimizer.lr_warmup_iters is None
    assert resolve(written).optimizer.lr_warmup_iters == 10
