"""YAML: what its looser notations mean here, and that recipes are found by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megavlm.command_line.recipes import recipe
from megavlm.config.schema import Config, TrainConfig
from megavlm.errors import UserError
from megavlm.rules.load import from_yaml_file, to_yaml


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("1.0e-4", 1e-4), ("1", 1.0), ("'2.5'", 2.5), ("1e3", 1e3)]
)
def test_numbers_in_any_notation(tmp_path: Path, text: str, value: float) -> None:
    lr = from_yaml_file(written(tmp_path, f"optimizer: {{lr: {text}}}")).optimizer.lr
    assert lr == value
    assert type(lr) is float


def test_lists_become_tuples_and_the_rest_keeps_its_default(tmp_path: Path) -> None:
    file = written(tmp_path, "model:\n  freeze:\n  - vision\n  language:\n    num_query_groups: null\n")
    config = from_yaml_file(file)
    assert config.model.freeze == ("vision",)
    assert config.train == TrainConfig()


def test_yaml_follows_the_schema_and_has_no_tags() -> None:
    text = to_yaml(Config())
    assert [line[:-1] for line in text.splitlines() if not line.startswith(" ")] == list(vars(Config()))
    assert "!" not in text
    assert text.isascii()


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(UserError, match="unknown recipe demos: did you mean demo\\?"):
        recipe("demos")


ALIASES = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "b0: &b0 {k0: 1}\n" + "".join(
    f"b{n}: &b{n}\n  <<: [{', '.join([f'*b{n - 1}'] * 9)}]\n  k{n}: 1\n" for n in range(1, 12)
)


@pytest.mark.parametrize("text", [ALIASES, MERGES, "a: &a [*a]\n"], ids=["aliases", "merges", "circle"])
def test_aliases_are_not_expanded_beyond_all_size(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="aliases expanded"):
        from_yaml_file(written(tmp_path, text))


def test_a_file_of_options_is_a_small_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read: .* bytes, more than"):
        from_yaml_file(written(tmp_path, "# \n" * 2**18))
    os.mkfifo(tmp_path / "fifo.yaml")
    with pytest.raises(UserError, match="no regular file"):
        from_yaml_file(tmp_path / "fifo.yaml")


def test_a_password_in_the_name_of_a_file_is_not_told() -> None:
    with pytest.raises(UserError) as refused:
        from_yaml_file("https://user:SECRET@host/run.yaml")
    assert "SECRET" not in str(refused.value)
