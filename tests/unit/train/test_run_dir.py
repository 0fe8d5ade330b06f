"""A run folder whose checkpoints are out of reach is refused: the run would begin anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megavlm.errors import UserError
from megavlm.train.run_dir import make_run_dir


@pytest.mark.parametrize(
    ("make", "said"),
    [(lambda path: path.symlink_to("/mnt/gone"), "/mnt/gone, which is not there"), (Path.touch, "no folder")],
)
def test_checkpoints_that_are_out_of_reach_end_the_run(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    make(tmp_path / "checkpoints")
    with pytest.raises(UserError, match=said):
        make_run_dir(tmp_path)


def test_a_link_to_another_disk_is_as_good_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    make_run_dir(tmp_path / "run")
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk")
    make_run_dir(tmp_path / "run")
