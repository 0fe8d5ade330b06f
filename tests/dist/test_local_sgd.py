"""Sites that train apart: outer steps are DiLoCo's, whatever the layout of a site, and a stopped run goes on."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from megavlm.backend import activate

activate()  # before the modules below import megatron-core

from megavlm.checkpoint import folders  # noqa: E402
from megavlm.checkpoint.hf.checkpoint_reader import CheckpointReader  # noqa: E402
from tests.support.flags import DROPOUT, HALF, TWO  # noqa: E402
from tests.support.local_sgd_reference import by_hand, trained_apart  # noqa: E402
from tests.support.pool import Pools  # noqa: E402
from tests.support.training import (  # noqa: E402
    SMALL,
    TEXT_TO_LEARN,
    assert_resumed,
    assert_same_curve,
    metrics,
    train,
)

RUN = [*SMALL, "--no-save"]
APART = "--outer-steps 2".split()
SIX = "--lr-warmup-iters 1 --train-iters 6".split()  # the outer momentum of step 2 shows after step 4


@pytest.mark.parametrize(
    ("sites", "inner", "lr", "momentum"),
    [
        (2, 2, 0.7, 0.9),
        pytest.param(4, 2, 0.5, 0.8, marks=pytest.mark.slow),
        pytest.param(2, 1, 1.0, 0.0, marks=pytest.mark.slow),  # the mean of weights after each step
        pytest.param(2, 3, 0.7, 0.9, marks=pytest.mark.slow),
    ],
)
def test_outer_steps_are_those_of_sites_on_their_own(
    pools: Pools, tmp_path: Path, sites: int, inner: int, lr: float, momentum: float
):
    # With Adam's own epsilon the update of a gradient near zero is its sign, which rounding may turn.
    argv = [*RUN, *"--lr-warmup-iters 0 --adam-eps 1e-4".split()]
    outer = f"--outer-steps {inner} --outer-groups {sites} --outer-lr {lr} --outer-momentum {momentum}".split()
    found = pools(sites).run(trained_apart, [*argv, *outer], str(tmp_path / "apart"), 2 * inner)
    options = {"rounds": 2, "inner": inner, "sites": sites, "lr": lr, "momentum": momentum}
    (expected,) = pools(1).run(_by_hand, argv, str(tmp_path / "hand"), options)
    for weights, sent in found:
        assert weights.keys() == expected.keys()
        for name, theirs in expected.items():
            assert float((weights[name] - theirs).abs().max()) < 1e-6, name
        numbers = sum(each.numel() for each in expected.values())
        assert sent == 2 * 2 * (sites - 1) / sites * 4 * numbers, "two rings in all steps"


def _by_hand(argv: list[str], run_dir: str, options: dict[str, float]) -> object:
    return by_hand(argv, run_dir, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (4, "--tp 2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (4, "--pp 2"),
                (4, ""),
                (4, "--cp 2"),
                (4, "--no-overlap-grad-reduce"),
                (4, "--pp 2 --vpp 2 --language-tie-embeddings"),
                (8, "--tp 2"),
                (8, "--tp 2 --pp 2"),
            )
        ),
    ],
)
def test_a_site_may_have_any_layout(pools: Pools, tmp_path: Path, world: int, flags: str):
    """Sites of one process and sites of several give the same numbers; the loss is that of all sites together."""
    argv = [*RUN, *APART, *[flag for flag in flags.split() if flag == "--language-tie-embeddings"]]
    pools(2).run(train, argv, str(tmp_path / "one"))
    pools(world).run(train, [*argv, *flags.split()], str(tmp_path / "many"))
    many, one = metrics(tmp_path / "many"), metrics(tmp_path / "one")
    assert_same_curve(many, one)


@pytest.mark.parametrize(
    ("world", "flags"),
    [(4, "--tp 2 --precision bf16"), (4, "--optimizer lion --lr 1e-4")],
)
@pytest.mark.slow
def test_same_layout_resumes_bit_for_bit(pools: Pools, tmp_path: Path, world: int, flags: str):
    """Also the moments, of which each site has its own, and the outer momentum."""
    argv = [*SMALL, *DROPOUT, *APART, *flags.split()]
    pools(world).run(train, [*argv, *SIX], str(tmp_path / "whole"))
    pools(world).run(train, [*argv, *TWO], str(tmp_path / "halves"))
    pools(world).run(train, [*argv, *SIX], str(tmp_path / "halves"))
    assert_resumed(metrics(tmp_path / "halves"), metrics(tmp_path / "whole"))


@pytest.mark.slow
def test_sites_resume_on_another_layout_and_end_as_one(pools: Pools, tmp_path: Path):
    argv = [*SMALL, *"--save-interval 2 --keep-checkpoints 0 --train-iters 6".split()]
    pools(2).run(train, [*argv, *APART], str(tmp_path / "whole"))
    pools(4).run(train, [*argv, *APART, *HALF, "--pp", "2"], str(tmp_path / "halves"))
    pools(4).run(train, [*argv, *APART, "--tp", "2"], str(tmp_path / "halves"))
    assert_same_curve(metrics(tmp_path / "halves"), metrics(tmp_path / "whole"))
    checkpoint = folders.newest(tmp_path / "halves/checkpoints")
    assert checkpoint is not None
    kinds = {".".join(key.split(".")[2:4]) for key in CheckpointReader(checkpoint).stored if "optimizer.state" in key}
    assert {kind for kind in kinds if "site1" in kind} == {"site1.exp_avg", "site1.exp_avg_sq"}
    assert any(kind.startswith("outer_momentum") for kind in kinds)
    # Without sites, and with sites where there were none: the weights, and the first site's moments.
    pools(1).run(train, [*argv, "--train-iters", "8"], str(tmp_path / "halves"))
    pools(2).run(train, [*argv, *APART, "--train-iters", "10"], str(tmp_path / "halves"))
    assert len(metrics(tmp_path / "halves")) == 10


@pytest.mark.slow
@pytest.mark.parametrize("inner", [10, 50])
def test_200_steps_of_sites_learn_the_text(pools: Pools, tmp_path: Path, inner: int):
    """The mean of what sites have learned: later windows, once all have learned the text, are within a hundredth."""
    argv = [*TEXT_TO_LEARN, "--global-batch-size", "8"]
    apart = f"--outer-steps {inner} --outer-lr 1 --outer-momentum 0".split()
    pools(2).run(train, argv, str(tmp_path / "exact"))
    pools(2).run(train, [*argv, *apart], str(tmp_path / "apart"))
    curves = [[record["loss"] for record in metrics(tmp_path / name)] for name in ("apart", "exact")]
    means = [[fmean(curve[start : start + 25]) for start in range(75, 200, 25)] for curve in curves]
    assert curves[0] != curves[1]
    assert means[0] == pytest.approx(means[1], rel=1e-2)
