"""What a run asks of the files of a Hugging Face folder, which it opens several times."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megavlm.checkpoint.hf import hf_files
from megavlm.checkpoint.hf.hf_files import HfFolder


def test_a_header_is_parsed_once_while_its_file_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[str]()

    def counting(path: str, **kwargs: Any) -> Any:
        opened.append(path)
        return safe_open(path, **kwargs)

    safe_open = hf_files.safe_open
    monkeypatch.setattr(hf_files, "safe_open", counting)
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2, 3)}, file)
    assert [HfFolder(tmp_path).tensors["weight"].shape for _ in range(3)] == [(2, 3)] * 3
    assert opened == [str(file)]
    save_file({"weight": torch.zeros(3, 2)}, file)  # of the same size
    os.utime(file, ns=(0, 1))
    assert HfFolder(tmp_path).tensors["weight"].shape == (3, 2)
    assert opened == [str(file)] * 2
