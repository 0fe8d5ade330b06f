"""FLOPs and bytes of a mixture of experts against what a step computes and sends."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from tests.support.pool import Pools
from tests.support.training import started

# Each expert gets equally many tokens, so that every rank sends as many.
MIXTURE = (
    "--train-iters 1 --global-batch-size 4 --micro-batch-size 2 --seq-length 64 --no-tensorboard --no-save --set "
    "model.vision.num_layers=1 --images-per-sample 1 --set model.language.num_layers=3 model.language.hidden_size=64 "
    "model.language.ffn_hidden_size=160 model.language.num_attention_heads=4 model.language.num_query_groups=2 "
    "model.language.vocab_size=128 --num-experts 8 --set model.experts.router_topk=2 "
    "model.experts.ffn_hidden_size=96 model.experts.dense_layers=[0] model.experts.shared_ffn_hidden_size=48 "
    "model.experts.shared_gate=true --moe-router-force-load-balancing"
)
LAYERS, TOKENS, TOPK, HIDDEN = 2, 128, 2, 64  # layers with experts; tokens of a micro-batch


def test_layers_take_the_flops_that_are_counted(pools: Pools, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Attention aside, which torch's counter does not see on a CPU."""
    ((found, predicted),) = pools(1).run(forward_flops, MIXTURE.split(), str(tmp_path / "run"))
    assert found == predicted
    assert found["language.layers.0"] != found["language.layers.1"] == found["language.layers.2"]


def test_rows_travel_as_often_as_the_formula_says(pools: Pools, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """t · top-k · H · e · (EP − 1) / EP from each rank, twice in each pass of a layer and micro-batch."""
    ranks = pools(2).run(rows_sent, [*MIXTURE.split(), "--ep", "2"], str(tmp_path / "run"))
    micro_batches = 1  # of a data-parallel rank
    expected = 4 * LAYERS * micro_batches * TOKENS * TOPK * HIDDEN * 4 // 2
    assert ranks == [(expected, expected), (expected, expected)]


def forward_flops(argv: list[str], run_dir: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the FLOPs of each language layer's forward pass: counted by torch, and predicted."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from megavlm.arch.kinds import layer_cost
    from megavlm.arch.layers import LANGUAGE_LAYER, kind_of
    from megavlm.arch.scenario import scenario_of
    from megavlm.model.context import MicroBatchContext

    def grouped(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(2 * a[0] * a[1] * b[-1])

    run, batch = built(argv, run_dir)
    chunk = run.engine.chunks[0].module
    view = MicroBatchContext(batch.to(run.backend.device), run.config, run.engine.groups, device=run.backend.device)
    work = scenario_of(run.config, run.plan.dims).work
    hidden, found, predicted = None, {}, {}
    for name in chunk.names:
        counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped})
        with counter, torch.no_grad():
            hidden = chunk.run_layer(name, hidden, view)
        if kind_of(name) == LANGUAGE_LAYER:
            cost = layer_cost(name, run.config.model, work)
            found[name] = counter.get_total_flops()
            predicted[name] = cost.forward_flops - cost.attention_flops
    finished(run)
    return found, predicted


def rows_sent(argv: list[str], run_dir: str) -> tuple[int, float]:
    """Return the bytes of rows that this rank sends to others in a step: counted, and predicted."""
    import torch.distributed as dist

    from megavlm.arch.kinds import kind_in
    from megavlm.arch.scenario import scenario_of

    run, batch = built(argv, run_dir)
    sent, exchange, rank = 0, dist.all_to_all_single, dist.get_rank()

    def counted(received: Any, outgoing: Any, *args: Any, input_split_sizes: Any = None, **kwargs: Any) -> Any:
        nonlocal sent
        if outgoing.dim() > 1:  # not their weights
            splits = input_split_sizes if input_split_sizes is not None else [len(outgoing) // 2] * 2
            others = sum(int(size) for index, size in enumerate(splits) if index != rank)
            sent += others * outgoing.shape[1] * outgoing.element_size()
        return exchange(received, outgoing, *args, input_split_sizes=input_split_sizes, **kwargs)

    with patch.object(dist, "all_to_all_single", counted):
        run.engine.train_step([batch])
    scenario = scenario_of(run.config, run.plan.dims)
    each = kind_in(scenario.model, "language.layers.1").expert_exchange(scenario)
    finished(run)
    return sent, 2 * LAYERS * sum(exchange.size * (exchange.ranks - 1) / exchange.ranks for exchange in each)


def built(argv: list[str], run_dir: str) -> tuple[Any, Any]:
    """Return a run, and the first micro-batch of its first step."""

    run = started(argv, run_dir)
    return run, run.data_loader.next_step().batches[0]


def finished(run: Any) -> None:
    from megavlm.train.loop import close

    close(run)
