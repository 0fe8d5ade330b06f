"""What users get wrong is refused in one line that names the option and the remedy; defaults of starts and splits.

Rule mistakes also carry the flags that follow the remedy, and these must satisfy `check`: advice has to work.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm import rules
from megavlm.arch.tensor_split import HeadSplit, Part, head_split, mlp_share, share_of, share_runs
from megavlm.checkpoint.begun import as_begun
from megavlm.command_line.parsing import parse
from megavlm.command_line.words import RUN_FLAGS
from megavlm.config.derived import device_queues, minutes_to_meet, overlapped, sequence_parallel
from megavlm.config.lora_config import beyond_adapters, frozen_parts
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.families import published_model
from megavlm.programs.sweep.grid import check_variants, read_grid, variants_of
from megavlm.rules import first
from megavlm.rules.check import RULES, check
from megavlm.rules.defaults import START_DEFAULTS, resolve, start_table, with_start_defaults
from megavlm.rules.fields import Option, options, value_at, with_values
from megavlm.rules.layout_rules import WORLD_RULES
from megavlm.rules.load import to_yaml
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
    values = {option.path: value_at(parse(shlex.split(mistake.fix)), option.path) for option in options_in(mistake.fix)}
    check(with_values(mistaken, values), world=mistake.world)


def options_in(flags: str) -> list[Option]:
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


KEYS = [default.option for default in START_DEFAULTS]
TOY = [(), "fp32", 1e-3, None, None, None, 0, 64, 0, None]


def values(config: Config) -> list[object]:
    return [value_at(config, key.split(".")) for key in KEYS]


def begun(folder: Path, config: Config) -> Path:
    """Write the files of an earlier run that a later one reads: its configuration and a checkpoint's folder."""
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


def test_a_warm_up_in_parts_replaces_that_of_the_run_that_is_continued(tmp_path: Path) -> None:
    given = ["--init-from", "F", "--train-iters", "1000", "--run-dir", str(tmp_path)]
    begun(tmp_path, with_start_defaults(parse(given)))
    now = as_begun(parse([*given, "--lr-warmup-fraction", "0.05"]))
    check(now, world=1)
    assert resolve(now).optimizer.lr_warmup_iters == 50


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


@st.composite
def splits(draw: st.DrawFn) -> HeadSplit:
    groups, per_group = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return head_split(groups * per_group, groups, draw(st.integers(1, 12)), draw(st.integers(1, 12)))


def rows(part: Part) -> dict[int, int]:
    """The model's row of each row of a rank."""
    found = {run.local + at: run.real + at for run in part.runs for at in range(run.count)}
    assert len(found) == sum(run.count for run in part.runs), "rows of a rank are in one run each"
    return found


@given(splits())
def test_ranks_hold_each_row_of_the_model_once(split: HeadSplit) -> None:
    weights = {
        split.local_rows: split.qkv_part,
        split.local_heads * split.width: lambda rank: split.query_part(rank, axis=1),
        split.slots * split.part_width: split.key_part,
    }
    for own, part_of in weights.items():
        parts = [part_of(rank) for rank in range(split.tp)]
        assert sorted(row for part in parts for row in rows(part).values()) == list(range(parts[0].size))
        assert all(0 <= local < own for part in parts for local in rows(part))


@given(splits())
def test_query_heads_meet_their_keys(split: HeadSplit) -> None:
    """Query head i attends to key/value head i // (heads / groups), all of whose channels arrive in their order."""
    for rank in range(split.tp):
        slots, exchange = split.slots_of(rank), split.exchange(rank)
        arriving = [
            (split.slots_of(source)[number].group, split.slots_of(source)[number].piece)
            for source in range(split.tp)
            for number in split.exchange(source).sends[rank]
        ]
        assert exchange.receives == tuple(len(split.exchange(source).sends[rank]) for source in range(split.tp))
        for number, slot in enumerate(slots):
            heads = range(slot.first, slot.first + slot.count)
            assert all(head // split.per_group == slot.group for head in heads)
            if split.copies > 1:
                assert [arriving[at] for at in exchange.places[number]] == [
                    (slot.group, piece) for piece in range(split.copies)
                ]
            local = rows(split.query_part(rank, axis=0))
            real = {number * split.queries + at: head for at, head in enumerate(heads)}
            for at in range(number * split.queries, (number + 1) * split.queries):
                found = {local.get(at * split.width + channel) for channel in range(split.width)}
                expected = {real[at] * split.width + c for c in range(split.width)} if at in real else {None}
                assert found == expected
                padded = at in split.padded_heads(rank)
                assert padded == (at not in real and split.copies > 1)


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "slots", "queries", "copies", "is_even"),
    [
        (28, 4, 8, 1, 4, 2, False),  # Qwen2.5-VL-7B: 32 heads where 28 are
        (28, 4, 4, 1, 7, 1, True),
        (12, 2, 8, 1, 2, 4, False),
        (24, 6, 4, 3, 2, 2, False),  # no padding: a rank has one and a half groups
        (25, 25, 8, 4, 1, 1, False),  # InternViT-6B
        (28, 4, 32, 1, 1, 7, False),  # Qwen2.5-VL-7B: four ranks have padding alone
    ],
)
def test_splits(heads: int, groups: int, tp: int, slots: int, queries: int, copies: int, is_even: bool) -> None:
    split = head_split(heads, groups, 128, tp)
    assert (split.slots, split.queries, split.copies, split.is_even) == (slots, queries, copies, is_even)


def test_an_even_split_is_one_run() -> None:
    split = head_split(32, 8, 128, 4)
    assert [len(part.runs) for part in (split.qkv_part(3), split.query_part(3, axis=1), split.key_part(3))] == [1, 1, 1]
    assert split.received == 0


@given(st.integers(1, 600), st.integers(1, 12), st.integers(1, 3), st.sampled_from([share_of, mlp_share]))
def test_widths_are_divided_once(size: int, tp: int, blocks: int, share: Callable[[int, int], int]) -> None:
    parts = [Part(0, blocks * size, share_runs(size, tp, rank, blocks=blocks, share=share)) for rank in range(tp)]
    assert sorted(row for part in parts for row in rows(part).values()) == list(range(blocks * size))
    assert all(local < blocks * share(size, tp) for part in parts for local in rows(part))


@pytest.mark.parametrize(
    ("width", "tp", "share"),
    [
        (3420, 1, 3424),  # Qwen2.5-VL
        (3420, 8, 432),
        (3420, 32, 107),  # 112 would leave the last rank padding alone
        (4304, 4, 1088),  # SigLIP-so400m
        (60, 2, 30),  # too narrow
    ],
)
def test_shares_of_mlps(width: int, tp: int, share: int) -> None:
    assert mlp_share(width, tp) == share


@pytest.mark.parametrize("recipe", ["", "--recipe demo"])
def test_tp_8_and_pp_2_is_a_layout_of_the_default_model(recipe: str) -> None:
    check(parse(f"{recipe} --tp 8 --pp 2".split()), world=16)
