"""Which models a checkpoint is accepted for."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from megavlm.backend import activate

activate()  # before the module below imports megatron-core

from megavlm.checkpoint.summary import check_model  # noqa: E402
from megavlm.command_line.parsing import parse  # noqa: E402
from megavlm.errors import UserError  # noqa: E402
from megavlm.rules.defaults import resolve  # noqa: E402


def test_another_vocabulary_does_not_fit(tmp_path: Path) -> None:
    other = json.loads(json.dumps({"model": asdict(parse(["--set", "model.language.vocab_size=99"]).model)}))
    with pytest.raises(UserError, match=r"model\.language\.vocab_size = 99, but this run has 160"):
        check_model(other, resolve(parse([]), vocab_size=160), Path("run"))
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=f"--config {tmp_path}/config.yaml has all"):
        check_model(other, resolve(parse([]), vocab_size=160), tmp_path / "checkpoints/iter_0000005")
