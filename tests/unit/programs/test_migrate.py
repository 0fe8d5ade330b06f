"""Configurations of other trainers become ours, with a list of what differs, and go back as far as they can."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megavlm.command_line.migration import _converted, line_of
from megavlm.command_line.migration_tables import CONVERSIONS, _data, conflicts, kinds, normalised
from megavlm.command_line.parsing import parse
from megavlm.programs.migrate import main
from megavlm.rules.check import check
from megavlm.rules.fields import options, value_at
from megavlm.rules.load import as_data

EXAMPLES = Path(__file__).parent / "migrate"
FILES = sorted(path.name for path in EXAMPLES.iterdir() if not path.name.endswith((".list", ".config.yaml")))
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
# Flags in the notes that are no options of a run: of this command, of torchrun and of Megatron-LM.
OTHERS = {
    "--from",
    "--world-size",
    "--nproc-per-node",
    "--nnodes",
    "--help-all",
    "--dry-run",
    "--calculate-per-token-loss",
}
KEYS = {option.key: option for option in options()}


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_exactly_this(name: str, tmp_path, monkeypatch, capsys):
    """NAME.list is what is printed, NAME.config.yaml what is written; to renew them, read what changed."""
    monkeypatch.chdir(EXAMPLES)
    out = tmp_path / f"{name}.config.yaml"
    assert main([name, "--out", str(out)]) == 0
    assert capsys.readouterr().out.replace(f"{tmp_path}/", "") == (EXAMPLES / f"{name}.list").read_text()
    assert out.read_text() == (EXAMPLES / out.name).read_text()
    config = parse(["--config", str(out)])
    if not config.checkpoint.init_from and not name.startswith("accelerate-2"):  # the others' layout is of a model
        check(config, world=config.run.world_size or 1)


def converted(folder: Path, text: str, *more: str, name: str = "file.json") -> Any:
    """Return the configuration that a file becomes."""
    (folder / name).write_text(text)
    assert main([str(folder / name), *more, "--out", str(folder / "out.yaml")]) == 0
    return parse(["--config", str(folder / "out.yaml")])


def test_processes_and_files_that_belong_together_make_the_batch(tmp_path):
    other = tmp_path / "train.yaml"
    other.write_text(
        "model_name_or_path: m\nstage: sft\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n"
        "max_grad_norm: 0.3\nnum_train_epochs: 1\nmax_steps: 50\n"
    )
    auto = {"train_batch_size": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
    config = converted(tmp_path, json.dumps(auto), str(other), "--world-size", "8")
    assert (config.train.micro_batch_size, config.train.global_batch_size) == (2, 64)
    assert (config.optimizer.clip_grad, config.run.world_size) == (0.3, 8)
    assert config.parallel.data_parallel_sharding == "optimizer_gradients"
    assert (config.train.train_iters, config.train.epochs) == (50, None)


def test_an_encoder_of_sounds_goes_with_the_tower(tmp_path: Path) -> None:
    given = {"model": "Qwen2.5-Omni-7B", "tuner_type": "lora", "target_modules": "all-linear"}
    assert converted(tmp_path, json.dumps(given)).model.freeze == ("vision", "projector", "audio")
    config = converted(tmp_path, json.dumps(given | {"freeze_vit": False}))
    assert (config.model.freeze, config.lora.targets) == (("projector",), ("language", "vision", "audio"))


@pytest.mark.parametrize(
    ("text", "there"),
    [
        (
            "stage: sft\nlr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 5}\n",
            "there a cosine unless decay_type says linear",
        ),
        (
            "num-layers: 2\ntrain-iters: 50\nlr-decay-style: WSD\nlr-wsd-decay-iters: 5\n",
            "there exponential unless lr_wsd_decay_style says linear",
        ),
    ],
)
def test_another_decay_of_wsd_is_said(text: str, there: str, tmp_path: Path, capsys) -> None:
    config = converted(tmp_path, text, name="file.yaml")
    assert (config.optimizer.lr_decay_style, config.optimizer.lr_wsd_decay_iters) == ("WSD", 5)
    assert there in capsys.readouterr().out


SEEN: dict[str, tuple[dict[str, Any], str, Any]] = {
    # file → one of our options, which the file leaves out or its trainer reads otherwise
    "images are shrunk": ({"template": "qwen2_vl"}, "data.max_pixels", 589_824),
    "images of a fixed size": ({"template": "llava"}, "data.max_pixels", None),
    "DeepSpeed's launcher": ({"num_gpus": 8, "gradient_accumulation_steps": 2}, "train.global_batch_size", 128),
    "SimPO": ({"stage": "dpo", "pref_loss": "simpo"}, "model.objective.beta", 0.1),
    "likelihood beside DPO": ({"stage": "dpo", "pref_ftx": 0.5}, "model.objective.rpo_alpha", 0.5),
    "labels of DPO": ({"stage": "dpo", "dpo_label_smoothing": 0.1}, "model.objective.label_smoothing", 0.1),
    "likelihood beside SimPO": ({"model": "m", "rlhf_type": "simpo"}, "model.objective.rpo_alpha", 1.0),
    "margin of SimPO": ({"model": "m", "rlhf_type": "simpo"}, "model.objective.simpo_gamma", 1.0),
    "groups of queries": ({"model": "m", "num_query_groups": 2}, "model.language.num_query_groups", None),
    "rewards near 0": ({"stage": "rm", "center_rewards_coefficient": 0.01}, "model.objective.center_rewards", 0.01),
    "Megatron-SWIFT": ({"model": "m", "global_batch_size": 4}, "optimizer.weight_decay", 0.1),
    "steps before a share": ({"warmup_steps": 20, "warmup_ratio": 0.0}, "optimizer.lr_warmup_iters", 20),
    "steps beside a share": ({"warmup_ratio": 0.1, "warmup_steps": 20}, "optimizer.lr_warmup_iters", 20),
    "constant": ({"lr_scheduler_type": "constant", "warmup_ratio": 0.03}, "optimizer.lr_warmup_fraction", None),
    "constant_with_warmup": (
        {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.03},
        "optimizer.lr_warmup_fraction",
        0.03,
    ),
}


@pytest.mark.parametrize("case", SEEN)
def test_what_holds_there_holds_here(case: str, tmp_path: Path) -> None:
    said, key, value = SEEN[case]
    trainer = {} if "model" in said else {"model_name_or_path": "m", "stage": "sft"}
    config = converted(tmp_path, json.dumps({"dataset": "a.json", **trainer, **said}))
    assert value_at(config, KEYS[key].path) == value


def test_a_file_that_is_not_named_is_not_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"train_batch_size": 8}')
    assert main(["ds.json"]) == 0
    before = Path("config.yaml").read_text()
    assert main(["ds.json", "--world-size", "2"]) == 2
    assert "config.yaml is there: name the file to write with --out" in capsys.readouterr().err
    assert Path("config.yaml").read_text() == before
    assert main(["ds.json", "--world-size", "2", "--out", "config.yaml"]) == 0
    assert Path("config.yaml").read_text() != before


def test_a_value_that_comes_later_counts(tmp_path, capsys):
    (tmp_path / "b.json").write_text('{"train_batch_size": 16}')
    config = converted(tmp_path, '{"train_batch_size": 8, "gradient_clipping": 1.0}', str(tmp_path / "b.json"))
    assert config.train.global_batch_size == 16
    assert "another key says otherwise" in capsys.readouterr().out


def test_a_script_is_not_executed(tmp_path, capsys):
    touch = f"touch {tmp_path}/ran"
    script = f"A=$({touch})\nB=`{touch}`\nX=--lr\nswift sft --lr $A --seed $B --train_type full --model m $X 2\n"
    assert converted(tmp_path, script, name="run.sh").checkpoint.init_from == "m"
    assert not (tmp_path / "ran").exists()
    assert capsys.readouterr().out.count("only a shell knows it") == 1  # of the seed; the last --lr counts


def test_words_of_a_script(tmp_path, capsys):
    script = """
N=${N:-4}  # machines
ARGS=(--micro-batch-size 2 '--lr' "1e-3" --adam-beta1=${B:-.5} )  # (a list)
if true; then M=1; else M=2; fi
MORE="--seed 7 --num-layers $N"
torchrun --nnodes=$N train.py ${ARGS[@]} --hidden-size 64 --train-iters $M $MORE && echo --a --b --c
"""
    config = converted(tmp_path, script, name="run.sh")
    assert (config.train.micro_batch_size, config.optimizer.lr, config.train.seed) == (2, 1e-3, 7)
    assert (config.model.language.num_layers, config.optimizer.adam_beta1, config.train.train_iters) == (4, 0.5, None)
    learned = "position-embedding-type: learned_absolute\n      the language model has rotary positions"
    assert learned in capsys.readouterr().out.partition("left out, with the defaults there")[2]


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "JSON": ("a.json", b'{"train_batch_size": 8', "is not valid JSON"),
    "deep JSON": ("a.json", b"[" * 10**5, "is not valid JSON"),
    "a list": ("a.json", b"[1, 2]", "has no options"),
    "YAML": ("a.yaml", b"a: [1", "is not valid YAML"),
    "a key twice": ("a.yaml", b"stage: sft\nstage: pt", "twice"),
    "a tag that runs code": ("a.yaml", b"stage: !!python/object/apply:os.system [id]", "is not valid YAML"),
    "empty": ("a.yaml", b"", "has no options"),
    "binary": ("a.sh", b"\xff\xfe\x00", "cannot be read"),
    "large": ("a.json", b" " * 2**20, "cannot be read"),
    "no option": ("a.sh", b"echo 'hello", "has no options"),
    "of Transformers alone": ("a.sh", b"train.py --model_name_or_path m --learning_rate 2e-5", "say it with --from"),
    "nobody's": ("a.yaml", b"colour: blue", "say it with --from"),
    "grows": ("a.sh", b"A=%b\nB='%b'\nrun --x $B" % (b"a" * 5000, b"$A " * 5000), "is too large for a script"),
    "refused": ("a.json", b'{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}', "nothing is written"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_line(case: str, tmp_path, capsys):
    name, content, says = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    assert main([str(tmp_path / name), "--out", str(tmp_path / "out.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megavlm migrate: ")
    assert says in line
    assert not (tmp_path / "out.yaml").exists()


def test_a_folder_and_a_missing_file_are_one_line(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "none.yaml"):
        assert main([str(path)]) == 2
        assert "cannot be read" in capsys.readouterr().err
    assert main(["a", "b", "--to", "fsdp"]) == 2


THERE_AND_BACK = yaml.safe_load(Path(__file__).with_name("there_and_back.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", THERE_AND_BACK)
def test_there_and_back(case: str, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(THERE_AND_BACK[case]["options"]))
    before = parse(["--config", "run.yaml"])
    assert main(["run.yaml", "--to", case.partition(",")[0]]) == 0
    capsys.readouterr()
    assert main([THERE_AND_BACK[case]["file"], "--world-size", str(before.run.world_size), "--out", "back.yaml"]) == 0
    after = parse(["--config", "back.yaml"])
    assert {o.key for o in options() if value_at(before, o.path) != value_at(after, o.path)} == set()


@pytest.mark.slow  # Accelerate's imports
@pytest.mark.parametrize("case", THERE_AND_BACK)
def test_accelerate_reads_what_is_written(case: str, tmp_path, monkeypatch):
    """It refuses keys that it does not know."""
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    monkeypatch.chdir(tmp_path)
    said, file = (THERE_AND_BACK[case][key] for key in ("options", "file"))
    Path("run.yaml").write_text(yaml.safe_dump(said))
    assert main(["run.yaml", "--to", case.partition(",")[0]]) == 0
    whole = said["parallel"]["data_parallel_sharding"] == "full"
    if file.endswith(".json"):
        assert HfDeepSpeedConfig(file).is_zero3() is whole
    else:
        found = load_config_from_file(file)
        assert found.fsdp_config["fsdp_reshard_after_forward"] is whole
        assert found.num_processes == said["run"]["world_size"]


def test_a_schedule_that_cannot_go_back_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for settings, why in (("lr: 1.0e-4", "--train-iters"), ("lr: 1.0e-4, lr_decay_style: WSD", "--train-iters")):
        Path("run.yaml").write_text(f"optimizer: {{{settings}}}\n")
        assert main(["run.yaml", "--to", "deepspeed", "--out", "ds.json"]) == 0
        assert why in capsys.readouterr().out
    Path("run.yaml").write_text("optimizer: {lr: 1.0e-4, lr_decay_style: WSD}\ntrain: {train_iters: 9}\n")
    assert main(["run.yaml", "--to", "deepspeed", "--out", "ds.json"]) == 0
    assert "the training script makes this one" in capsys.readouterr().out
    assert "scheduler" not in json.loads(Path("ds.json").read_text())


def test_groups_of_a_machine_are_shard_groups(tmp_path):
    text = "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 16\nfsdp_config:\n  fsdp_sharding_strategy: %s\n"
    parallel = converted(tmp_path, text % "HYBRID_SHARD", name="file.yaml").parallel
    assert (parallel.data_parallel_sharding, parallel.hybrid_shard_size) == ("full", 8)
    assert converted(tmp_path, text % "FULL_SHARD", name="file.yaml").parallel.hybrid_shard_size is None


def test_the_rows_name_what_exists():
    for kind in kinds().values():
        for name, row in kind.rows.items():
            assert not row.by or row.by in CONVERSIONS, name
            assert row.to or row.by or row.words is not None or row.refuse, name
            if not kind.otherwise:
                assert not row.to or row.to in KEYS, name
                for value in (row.words or {}).values():
                    found = value if isinstance(value, dict) else {row.to: value}
                    assert all(_converted(key, each) == each for key, each in found.items()), (name, value)
        names = [name for group in kind.defaults for name in group["values"]]
        lines = [line_of(kind, name, True, {**dict.fromkeys(names, 1), "processes": 1}) for name in names]
        assert not [line.key for line in lines if "no table has it" in line.note]
    assert {conflict.key for conflict in conflicts()} <= KEYS.keys()
    used = {row.by for kind in kinds().values() for row in kind.rows.values()}
    used |= {
        value["by"]
        for kind in kinds().values()
        for group in kind.defaults
        for value in group["values"].values()
        if isinstance(value, dict)
    }
    assert used - {""} == CONVERSIONS.keys()


def test_notes_name_flags_that_exist():
    known = OTHERS | {flag for option in options() for flag in (*option.flags, *option.negations)}
    assert set(FLAG.findall(json.dumps(_data()))) - known == set()
    assert normalised("Zero_Stage") == "zero-optimization.stage"
    assert as_data(KEYS["lora.targets"].default) == ["language"]
