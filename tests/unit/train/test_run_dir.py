"""A run folder whose checkpoints are out of reach is refused: the run would begin anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from megavlm.errors import UserError
from megavlm.train.run_dir import make_run_dir


@pytest.mark.parametrize(
    ("make", "said"),
    [(lambda path: path.symlink_to("/mnt/gone"), "/mnt/gone, which is not there"), (Path.touch, "no folder")],
)
def test_checkpoints_that_are_out_of_reach_end_the_run(tmp_path, make, said):
    make(tmp_path / "checkpoints")
    with pytest.raises(UserError, match=said):
        make_run_dir(tmp_path)
