"""What users get wrong: every mistake is refused in one line that names the option and the remedy.

Rule mistakes also carry the flags that follow the remedy, and these must satisfy `check`: advice has to work.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megavlm import rules
from megavlm.command_line.parsing import parse
from megavlm.command_line.words import RUN_FLAGS
from megavlm.config.derived import device_queues, minutes_to_meet, overlapped, sequence_parallel
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.families import published_model
from megavlm.programs.sweep.grid import check_variants, read_grid, variants_of
from megavlm.rules import first
from megavlm.rules.check import RULES, check
from megavlm.rules.defaults import with_start_defaults
from megavlm.rules.fields import Option, options, value_at, with_values
from megavlm.rules.layout_rules import WORLD_RULES
from megavlm.rules.precision_rules import fp8_fits_the_widths

pytestmark = pytest.mark.usefixtures("one_parser")


KEY = rf"(?:{'|'.join(field.name for field in fields(Config))})\.[\w.]*\w"


class Mistake(NamedTuple):
    argv: str
    names: str  # the option, in the message
    remedy: str  # a piece of the message
    fix: str | None = None  # flags that follow the advice; appended, so that they override
    world: int = 1


def rows_by_section() -> dict[str, list[list[str]]]:
    """Return the rows of the table, mistakes.txt, by section."""
    path = Path(__file__).with_name("mistakes.txt")
    found: dict[str, list[list[str]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            rows = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            rows.append(line.replace("{file}", __file__).split(" | "))
    return found


ROWS = rows_by_section()
FILES, GRIDS = ROWS.pop("files"), [text for (text,) in ROWS.pop("grids")]
del ROWS["allowed"]
TABLE = {
    section: [Mistake(argv, names, remedy, *more[:1], *map(int, more[1:])) for argv, names, remedy, *more in rows]
    for section, rows in ROWS.items()
}
TABLE["run"] += [  # what is no text
    Mistake("--run-dir a\udcff", "--run-dir", "cannot be used", "--run-dir a"),
    Mistake("--run-dir a\0b", "--run-dir", "cannot be used", "--run-dir a"),
]
SPELLING, TYPES = TABLE["spelling"], TABLE["types"]
RULE_MISTAKES = [mistake for section in list(TABLE)[2:] for mistake in TABLE[section]]
KNOWN = {
    *RUN_FLAGS,
    "--flag",
    "--nproc-per-node",
    *(flag for option in options() for flag in (*option.flags, *option.negations)),
}


def complaint(argv: list[str], *, world: int) -> str:
    with pytest.raises(UserError) as caught:
        check(parse(argv), world=world)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize("mistake", [*SPELLING, *TYPES, *RULE_MISTAKES], ids=lambda mistake: mistake.argv[:60])
def test_a_mistake_is_named_with_its_remedy(mistake: Mistake) -> None:
    argv = shlex.split(mistake.argv)
    message = complaint(argv, world=mistake.world)
    assert mistake.names in message
    assert mistake.remedy in message
    unknown = {word.partition("=")[0] for word in argv} if mistake in SPELLING else set()
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", message)) <= KNOWN | unknown
    keys = {key for key in re.findall(KEY, message) if not key.endswith(".yaml")}
    assert mistake in SPELLING or keys <= {option.key for option in options()}


@pytest.mark.parametrize("mistake", RULE_MISTAKES, ids=lambda mistake: mistake.argv[:60])
def test_the_remedy_works(mistake: Mistake) -> None:
    mistaken = parse(shlex.split(mistake.argv))
    if "--datasets" in mistake.fix:  # data sets add up: the remedy is in their place
        mistaken = replace(mistaken, data=replace(mistaken.data, datasets=()))
    values = {option.path: value_at(parse(shlex.split(mistake.fix)), option.path) for option in given(mistake.fix)}
    check(with_values(mistaken, values), world=mistake.world)


def given(flags: str) -> list[Option]:
    words = {word.partition("=")[0] for word in shlex.split(flags)}
    return [option for option in options() if words & {option.key, *option.flags, *option.negations}]


def test_every_message_has_a_mistake() -> None:
    """A message that nothing here trips is one that nobody has seen work: each `yield` of a rule is reached."""
    reached = set()
    for mistake in RULE_MISTAKES[len(TABLE["ranges"]) :]:
        config = with_start_defaults(parse(shlex.split(mistake.argv)))
        ran = [*(rule(config) for rule in RULES), *(rule(config, mistake.world) for rule in WORLD_RULES)]
        line = next(line for line in map(place_of_message, ran) if line)  # lazily: a rule relies on those before it
        reached.add(line)
    unseen = [place[0] for place in messages() if not any(one in reached for one in place)]
    assert all(file == "run_rules.py" for file, _ in unseen), unseen
    assert len(unseen) == 2, "of folders with a model and with checkpoints, which tests below make"


def place_of_message(rule: Any) -> tuple[str, int] | None:
    """The file and line of the `yield` at which a rule has stopped, through those that it yields from."""
    if next(rule, None) is None:
        return None
    while rule.gi_yieldfrom is not None:
        rule = rule.gi_yieldfrom
    return Path(rule.gi_code.co_filename).name, rule.gi_frame.f_lineno


def messages() -> Iterator[list[tuple[str, int]]]:
    """Yield the file and the lines of each message in the modules of rules."""
    for file in sorted(Path(rules.__file__).parent.glob("*_rules.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Yield):
                yield [(file.name, line) for line in range(node.lineno, (node.end_lineno or 0) + 1)]


YAML_MISTAKES = [(text.encode().decode("unicode_escape"), names, remedy) for text, names, remedy in FILES]


@pytest.mark.parametrize(("text", "names", "remedy"), YAML_MISTAKES)
def test_a_mistake_in_a_file_is_named_with_its_remedy(tmp_path: Path, text: str, names: str, remedy: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    message = complaint(["--config", str(path)], world=1)
    assert f"--config {path}" in message or path.name in message
    assert names in message
    assert remedy in message


@pytest.mark.parametrize("text", GRIDS)
def test_a_mistake_in_a_sweep_is_named_as_on_the_command_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "grid.yaml").write_text("run_dir: sweeps/a\n{}\n".format(text.replace("\\n", "\n")))
    grid = read_grid(tmp_path / "grid.yaml")
    first = variants_of(grid)[0]
    with pytest.raises(UserError, match=re.escape(f"variant {first.name}: ")) as caught:
        check_variants(grid, [first], further=lambda config: None)
    assert str(caught.value).partition(": ")[2] == complaint(list(first.flags), world=1)


def test_a_run_writes_into_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert "has a config.json, as models do: name another folder" in complaint(["--run-dir", str(tmp_path)], world=1)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/iter_0000005"])
def test_a_run_writes_into_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoints/iter_0000005").mkdir(parents=True)
    (tmp_path / "checkpoints/iter_0000005/megavlm.json").touch()
    message = complaint(["--run-dir", str(tmp_path / name)], world=1)
    assert "is not a run, but its checkpoints: give it to --load" in message
    check(parse(["--load", str(tmp_path / name), "--run-dir", str(tmp_path / "other")]), world=1)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\xff\xfe\x00\x80")
    assert "not UTF-8" in complaint(["--config", str(path)], world=1)


# The bounds of these depend on other options; rules.py and the planner check them.
UNRANGED = {"model.vision.feature_layer", "model.objective.sigmoid_bias", "placement.pipeline_cuts"}


def test_every_number_has_a_range() -> None:
    numbers = {option.key for option in options() if option.kind.scalar in (int, float)}
    assert {option.key for option in options() if option.valid is not None} == numbers - UNRANGED


def test_the_defaults_are_a_run() -> None:
    for world in (1, 2, 4, 8):
        check(Config(), world=world)


@pytest.mark.parametrize("row", rows_by_section()["allowed"], ids=lambda row: row[0])
def test_what_works_is_allowed(row: list[str]) -> None:
    check(parse(row[0].split()), world=int(row[1]) if len(row) > 1 else 1)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_fp8_takes_widths_of_mlps_that_are_padded(tp: int) -> None:
    """Qwen2.5-VL's tower is 3,420 wide. MXFP8 needs multiples of 32, which 3,424 is, and 1,712 on each of two ranks is
    not.
    """
    argv = f"--precision bf16 --fp8 hybrid --fp8-parts vision --tp {tp}".split()
    config = replace(parse(argv), model=published_model("qwen2_5_vl_7b"))
    assert first((fp8_fits_the_widths,), config) is None
    in_blocks = replace(config, precision=replace(config.precision, fp8_recipe="mxfp8"))
    assert (first((fp8_fits_the_widths,), in_blocks) is None) == (tp in (1, 4))


@pytest.mark.parametrize(
    ("argv", "expected"), [("", False), ("--tp 2", True), ("--tp 2 --no-sp", False), ("--tp 2 --sp", True)]
)
def test_sequence_parallelism_follows_tp_unless_asked(argv: str, expected: bool) -> None:
    assert sequence_parallel(parse(argv.split())) is expected


@pytest.mark.parametrize(
    ("argv", "dp", "expected"),
    [
        ("", 2, (True, True)),
        ("", 1, (False, False)),
        ("--data-parallel-sharding none", 2, (True, False)),
        ("--data-parallel-sharding full", 2, (False, False)),
        ("--no-overlap-grad-reduce", 2, (False, False)),
        ("--no-overlap-param-gather", 2, (True, False)),
        ("--overlap-param-gather", 1, (True, True)),
        ("--overlap-grad-reduce", 1, (True, False)),
    ],
)
def test_overlaps_are_on_where_they_hide_something(argv: str, dp: int, expected: tuple[bool, bool]) -> None:
    parallel = overlapped(parse(argv.split()), dp=dp).parallel
    assert (parallel.overlap_grad_reduce, parallel.overlap_param_gather) == expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", None),
        ("--tp 2", 1),
        ("--tp 2 --data-parallel-sharding full", 32),
        ("--placement colocated --encode-ahead --freeze vision projector", 32),
    ],
)
def test_kernels_begin_in_order_for_tensor_parallelism_alone(argv: str, expected: int | None) -> None:
    assert device_queues(parse(argv.split())) == expected


def test_a_run_dir_that_exists_is_resumed(tmp_path: pytest.TempPathFactory) -> None:
    check(parse(["--run-dir", str(tmp_path)]), world=1)


@pytest.mark.parametrize(("flags", "minutes"), [("--init-from HF", 10), ("--vision-from s3://bucket/clip", 60)])
def test_ranks_wait_for_nodes_that_copy_a_model(flags: str, minutes: float):
    assert minutes_to_meet(parse(flags.split())) == minutes
