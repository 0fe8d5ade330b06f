"""The vocabulary's size is known before anything is planned, and is the one that the data are written with."""

from __future__ import annotations

from pathlib import Path

import pytest

from megavlm.arch.dims import Dims
from megavlm.arch.kinds import step_flops
from megavlm.arch.plan import make_plan
from megavlm.arch.workload import typical_workload
from megavlm.command_line.parsing import parse
from megavlm.data.file_source import FilesSource
from megavlm.data.synthetic import SyntheticSource
from megavlm.demo.digits import DigitsSource
from megavlm.errors import UserError
from megavlm.rules.defaults import resolve
from megavlm.train.build_source import vocab_size_of
from tests.support.data_files import write_tokenizer

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
