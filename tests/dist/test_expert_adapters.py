"""LoRA of routed experts, and a router trained beside it: at any layout the numbers of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pool import Pools
from tests.support.training import SMALL, assert_same_curve, metrics, train

# A rank that grouped products do not read, so that it is padded; a dense first layer; a shared expert.
LORA = (
    "--num-experts 4 --set model.experts.ffn_hidden_size=24 model.experts.dense_layers=[0] "
    "model.experts.shared_ffn_hidden_size=32 --lora-rank 3 --lora-alpha 12 --lora-targets language experts --freeze "
    "vision projector --lr 1e-2 --set lora.train_router=true --moe-aux-loss-coeff 0.1"
).split()


@pytest.fixture(scope="module")
def one(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("lora")
    pools(1).run(train, [*SMALL, *LORA], str(run_dir))
    return run_dir


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, "--tp 2"),
        pytest.param(4, "--tp 2 --ep 2 --etp 2", marks=pytest.mark.slow),
        pytest.param(2, "--ep 2", marks=pytest.mark.slow),
        pytest.param(4, "--ep 2 --etp 2 --data-parallel-sharding none", marks=pytest.mark.slow),
        pytest.param(4, "--tp 2 --etp 1", marks=pytest.mark.slow),
        pytest.param(4, "--pp 2 --vpp 2 --ep 2 --recompute-granularity full", marks=pytest.mark.slow),
        pytest.param(2, "--cp 2 --ep 2 --moe-token-dispatcher-type allgather", marks=pytest.mark.slow),
        pytest.param(4, "--tp 2 --ep 2 --overlap-grad-reduce --overlap-param-gather", marks=pytest.mark.slow),
    ],
)
def test_layouts_train_alike(pools: Pools, one: Path, tmp_path: Path, world: int, layout: str) -> None:
    pools(world).run(train, [*SMALL, *LORA, "--no-save", *layout.split()], str(tmp_path))
    assert_same_curve(metrics(tmp_path), metrics(one))


@pytest.mark.slow
def test_adapters_move_between_layouts(pools: Pools, one: Path, tmp_path: Path) -> None:
    """Curves alone do not see rows of B, which begins at zero, in the wrong place: another layout's next steps do."""
    layouts = ((4, "--tp 2 --ep 2 --etp 2"), (2, "--ep 2"), (2, "--tp 2"))
    for number, (world, layout) in enumerate(layouts):
        pools(world).run(train, [*SMALL, *LORA, *layout.split(), "--train-iters", str(number + 2)], str(tmp_path))
    assert_same_curve(metrics(tmp_path), metrics(one))
