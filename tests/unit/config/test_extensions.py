"""`--extension`: what it adds is an option like any other; what is wrong with it is one line."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]

from megavlm.command_line.parsing import parse
from megavlm.config.option import AT_LEAST_1, option
from megavlm.config.registry import Entry, Extension, registry
from megavlm.errors import UserError
from megavlm.inputs.vision_inputs import VisionInput, vision_input_of
from megavlm.rules.check import check
from megavlm.rules.defaults import resolve
from megavlm.rules.extensions import extensions_of, load_extensions, missing_extensions
from megavlm.rules.fields import options
from megavlm.rules.load import as_data, from_dict, to_yaml
from tests.support.extensions import EXAMPLES, PACKAGES, forget, install

POOLED = "--extension pooled_attention --projector-kind pooled".split()


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Extensions of a test are of this test alone."""
    install()
    yield
    forget()


def refusal(argv: str) -> str:
    with pytest.raises(UserError) as refused:
        check(parse(argv.split()), world=1)
    assert str(refused.value).isprintable()
    return str(refused.value)


def test_an_extension_brings_options_with_defaults_that_follow_from_others() -> None:
    config = parse([*POOLED, "--set", "model.projector.connectors.pooled.tokens=5"])
    assert config.run.extension == ("pooled_attention",)
    assert config.model.projector.connectors.pooled.tokens == 5
    assert resolve(config).model.projector.connectors.pooled.width == 128
    check(config, world=2)


def test_yaml_says_the_same_and_names_the_extension(tmp_path: Path) -> None:
    config = parse(
        [*POOLED, "--set", "model.projector.connectors.pooled.tokens=5", "--set", "model.projector.pixel_shuffle=1"]
    )
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    assert yaml.safe_load(file.read_text())["model"]["projector"]["connectors"]["pooled"]["tokens"] == 5
    del registry()["pooled_attention"]
    assert parse(["--config", str(file)]) == config
    both = parse(["--config", str(file), "--extension", "counting_dots"])
    assert both.run.extension == ("pooled_attention", "counting_dots")


def test_help_lists_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, name in (
        ("--help-keys", "model.projector.connectors.pooled:\n  tokens=N"),
        ("--help-all", "--dots-most"),
    ):
        with pytest.raises(SystemExit):
            parse(["--extension", "pooled_attention", "counting_dots", flag])
        assert name in capsys.readouterr().out
        with pytest.raises(SystemExit):
            parse(["--help"])
        assert name not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("pooled_attention --pooled-token 3", "--set model.projector.connectors.pooled.tokens=VALUE?"),
        ("pooled_attention --set model.projector.connectors.pooled.tokens=0", ".pooled.tokens 0 must be at least 1"),
        ("pooled_attention --set model.projector.connectors.pooled.tokens=3", ": use --projector-kind pooled, or "),
        ("pooled_attention --projector-kind poled", ", pooled, got 'poled': did you mean pooled?"),
        (
            "pooled_attention --projector-kind pooled --set model.projector.pixel_shuffle=2",
            "model.projector.pixel_shuffle has no effect with --projector-kind pooled: use another kind, or leave",
        ),
        (
            "pooled_attention --projector-kind pooled --set model.vision.deepstack_layers=[0]",
            "--projector-kind pooled and model.vision.deepstack_layers cannot be combined",
        ),
        ("nothing_there", "--extension nothing_there: Python finds no module nothing_there: install it"),
        ("json", "--extension json: json has no EXTENSION of type megavlm.extension.Extension"),
        ("counting_dots --dots-most 3", "--dots-most has no effect without dots: use --data dots"),
        ("counting_dots --callback dots_lo", "--callback 'dots_lo' is not MODULE:CLASS"),
    ],
)
def test_mistakes_are_one_line(argv: str, line: str) -> None:
    assert line in refusal(f"--extension {argv}")


def test_a_rank_without_a_part_is_refused() -> None:
    config = parse([*POOLED, "--set", "model.projector.connectors.pooled.width=5", "--tp", "4"])
    with pytest.raises(UserError, match=r"--tensor-model-parallel-size 4 leaves ranks .* of values.weight .* use 3"):
        check(config, world=4)


@dataclass(frozen=True)
class Numbered:
    size: int = option(1, "Size.", valid=AT_LEAST_1)


@dataclass(frozen=True)
class Undeclared:
    size: int = 1


class Named:
    def __init__(self, name: str, options: type | None = None) -> None:
        self.name, self.options = name, options


@pytest.mark.parametrize(
    ("extension", "line"),
    [
        (Extension(connectors=(Named("mlp"),)), "--extension mine: megavlm has mlp among its connectors already"),
        (Extension(connectors=(Named("pooled"),)), "--extension pooled_attention has pooled among its connectors"),
        (Extension(sources=(Entry("files", "a:b"),)), "--extension mine: megavlm has files among its sources already"),
        (Extension(sources=(Entry("a", "a:b"), Entry("a", "a:b"))), "megavlm has a among its sources already"),
        (Extension(sources=(Entry("A b", "a:b"),)), "--extension mine: A b cannot be among its sources"),
        (Extension(sources=(Entry("items", "a:b", Numbered),)), "items cannot be among its sources"),
        (Extension(sources=(Entry("micro_batch", "a:b", Numbered),)), "another option is --micro-batch-size already"),
        (Extension(sources=(Entry("mine", "a:b", Undeclared),)), "--extension mine: its options cannot be read"),
    ],
)
def test_names_that_are_taken_are_refused_in_one_line(extension, line, monkeypatch):
    load_extensions(["pooled_attention"])
    monkeypatch.setattr("megavlm.rules.extensions.imported", lambda name: extension)
    known = options()
    with pytest.raises(UserError) as refused:
        load_extensions(["mine"])
    assert line in str(refused.value)
    assert options() == known, "what is refused leaves nothing behind"


MIRRORED = VisionInput("mirrored", make=np.fliplr)


def test_an_input_of_the_tower_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def declared(name: str) -> Extension:
        return Extension(inputs=(Entry(name, f"{__name__}:MIRRORED"),))

    monkeypatch.setattr("megavlm.rules.extensions.imported", declared)
    config = parse(["--extension", "mirrored", "--vision-input", "mirrored"])
    assert vision_input_of("mirrored", 3) is MIRRORED
    assert extensions_of(config) == ("mirrored",)
    with pytest.raises(UserError, match="--vision-input miror is not known: did you mean mirrored"):
        vision_input_of("miror", 3)
    with pytest.raises(UserError, match="--extension rgb: megavlm has rgb among its inputs already"):
        load_extensions(["rgb"])


def test_code_that_fails_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_extension.py").write_text("x = 1\nraise RuntimeError('not\\ntoday')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert refusal("--extension broken_extension") == (
        "--extension broken_extension cannot be imported: RuntimeError (broken_extension.py, line 2): not today"
    )


def test_an_entry_point_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[megavlm.extensions]\npooled = pooled_attention:EXTENSION\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert parse(["--extension", "pooled", "--projector-kind", "pooled"]).run.extension == ("pooled",)
    assert "did you mean pooled?" in refusal("--extension poled")


def test_what_a_checkpoint_says_of_extensions_imports_nothing() -> None:
    config = resolve(parse([*POOLED, "--extension", "counting_dots"]))
    assert extensions_of(config) == ("pooled_attention",), "the other one has no part in it"
    data = as_data(config.model, chosen=True)
    assert data["projector"]["connectors"] == {"pooled": {"tokens": 8, "width": 128}}
    del registry()["pooled_attention"]
    with pytest.raises(UserError, match="pooled"):
        from_dict({"model": data})
    assert "pooled_attention" not in registry()
    assert missing_extensions(["pooled_attention", "counting_dots"]) == "--extension pooled_attention"
    assert missing_extensions(None) is None


def test_sections_are_values() -> None:
    config = parse([*POOLED, "--set", "model.projector.connectors.pooled.tokens=5"])
    sections = config.model.projector.connectors
    assert hash(config) == hash(parse([*POOLED, "--set", "model.projector.connectors.pooled.tokens=5"]))
    assert parse([*POOLED, "--set", "model.projector.connectors.pooled.tokens=8"]) == parse(POOLED), (
        "a default is a default, said or not"
    )
    with pytest.raises(TypeError):
        sections["pooled"] = None
    with pytest.raises(AttributeError):
        _ = sections.unheard_of
    assert replace(config, model=config.model) == config


def test_a_process_that_gets_a_configuration_gets_its_extensions() -> None:
    """Workers that decode samples are spawned: they count the tokens of images by themselves."""
    given = parse([*POOLED, "--set", "model.projector.connectors.pooled.tokens=5"])
    sent = pickle.dumps(resolve(given).model.projector)
    program = (
        f"import sys, pickle; sys.path += {[str(EXAMPLES / name) for name in PACKAGES]}\n"
        f"projector = pickle.loads({sent!r})\n"
        "from megavlm.arch.image_tokens import tokens_per_grid\n"
        "print(tokens_per_grid((4, 4), projector))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "5\n"
