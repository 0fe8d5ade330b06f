"""`--offload optimizer=nvme:DIR` in whole runs: numbers as with host memory, resumed, and with a disk that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.covering import slow
from tests.support.flags import FOUR, TWO
from tests.support.forked import context, run_program
from tests.support.pool import Pools
from tests.support.torchrun import TINY
from tests.support.training import LEAN, SMALL, assert_same_curve, metrics, train, without_wall_time

BF16 = "--precision bf16"


def on_disk(argv: list[str], folder: Path) -> list[str]:
    return [*argv, "--offload", f"optimizer=nvme:{folder}"]


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, BF16),
        slow(2, f"--tp 2 {BF16}"),
        slow(2, f"{BF16} --data-parallel-sharding full"),
        slow(2, f"{BF16} --placement colocated --pp 2"),
        slow(2, "--precision fp16"),
    ],
)
def test_a_resumed_run_is_bit_for_bit_that_of_host_memory(pools: Pools, tmp_path: Path, world: int, flags: str) -> None:
    argv = [*LEAN, *flags.split()]
    pools(world).run(train, [*argv, *FOUR, "--offload", "optimizer"], str(tmp_path / "host"))
    for length in (TWO, FOUR):
        pools(world).run(train, on_disk([*argv, *length], tmp_path / "disk"), str(tmp_path / "halves"))
    assert without_wall_time(metrics(tmp_path / "halves")) == without_wall_time(metrics(tmp_path / "host"))
    assert not list((tmp_path / "disk").iterdir()), "files without a name"


@pytest.mark.slow
def test_it_resumes_on_another_layout(pools: Pools, one_process, tmp_path: Path) -> None:
    """Moments of two data-parallel ranks' disks, read by tensor-parallel ones into memory, and back."""
    argv = [*SMALL, "--train-iters"]
    pools(2).run(train, on_disk([*argv, "2"], tmp_path / "disk"), str(tmp_path / "run"))
    pools(2).run(train, [*argv, "3", "--tp", "2"], str(tmp_path / "run"))
    pools(2).run(train, on_disk([*argv, "4", "--pp", "2"], tmp_path / "disk"), str(tmp_path / "run"))
    assert_same_curve(metrics(tmp_path / "run"), one_process("plain", ["--train-iters", "4"]))


def run_until_full(argv: list[str], output: str, writes: int) -> None:
    """Run the program on a disk that has no room after so many writes of a step."""
    import errno
    import os

    write, left = os.pwritev, [writes]

    def full(*arguments: object) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)  # type: ignore[arg-type]

    os.pwritev = full  # type: ignore[assignment]
    run_program(argv, output)


def test_a_disk_that_gets_full_ends_the_run_in_one_line_and_loses_nothing(pools: Pools, tmp_path: Path) -> None:
    argv = [*TINY, "--train-iters", "4", "--save-interval", "1"]
    pools(1).run(train, argv, str(tmp_path / "whole"))
    with_disk = [*on_disk(argv, tmp_path / "disk"), "--run-dir", str(tmp_path / "run")]
    process = context().Process(target=run_until_full, args=(with_disk, str(tmp_path / "output"), 200))
    process.start()
    process.join()
    output = (tmp_path / "output").read_text()
    assert process.exitcode == 1, output
    (line,) = (line for line in output.splitlines() if line.startswith("pretrain_vlm.py: "))
    assert "No space left on device" in line
    assert "Traceback" not in output
    assert 0 < len(metrics(tmp_path / "run")) < 4, "the disk was full in the middle"
    pools(1).run(train, on_disk(argv, tmp_path / "disk"), str(tmp_path / "run"))
    assert without_wall_time(metrics(tmp_path / "run")) == without_wall_time(metrics(tmp_path / "whole"))
