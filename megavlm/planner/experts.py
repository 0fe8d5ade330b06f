"""Seconds of routed experts: their grouped products, and the exchanges that bring tokens to them and back.

A grouped product multiplies the rows of each expert by that expert's weights. It takes the longer of computing and of
moving its bytes (the roofline model; Williams et al. 2009). With few rows it is bound by reading weights: on an H100
below some 230 rows of an expert. It computes whole tiles of rows, of which the last of each expert is half empty in the
mean: r rows cost what r + tile / 2 do (`Hardware.rows_together`, which a profile of your own may set).
"""

from __future__ import annotations

from dataclasses import replace

from megavlm.arch.kind import Exchange
from megavlm.arch.kinds import layer_sizes
from megavlm.arch.scenario import Scenario
from megavlm.arch.transformer import RoutedRows
from megavlm.planner.collectives import all_to_all, group_of, ring_gather
from megavlm.planner.hardware import Hardware, Rates
from megavlm.planner.passes import Pair


def product_seconds(name: str, scenario: Scenario, hardware: Hardware, *, reached: bool, faster: float = 1.0) -> Pair:
    """Return the forward and backward seconds of a layer's grouped products on the busiest rank.

    They compute `faster` in FP8 than in bf16, and take the longer of that and of moving bf16's bytes.
    """
    routed = layer_sizes(name, scenario).routed
    assert routed is not None, name
    e, tile = scenario.bytes_each, hardware.rows_together
    ahead, back = (replace(rates, matmul=rates.matmul * faster) for rates in (hardware.forward, hardware.backward))
    once = routed.experts * 3 * routed.hidden * routed.ffn * e
    forward = _grouped(routed, ahead, tile=tile, weights=once, e=e)
    backward = 0.0
    if reached:
        backward += _grouped(routed, back, tile=tile, weights=once, e=e)
    if scenario.trains(name):  # rows are what is summed over: no tile of them is empty
        backward += _grouped(routed, back, tile=0.0, weights=once, e=e)
    return forward, backward


def _grouped(routed: RoutedRows, rates: Rates, *, tile: float, weights: float, e: int) -> float:
    """Return the seconds of the products with gate, up and down; `weights` are the bytes of theirs that are moved."""
    flops = 2 * 3 * routed.hidden * routed.ffn * (routed.rows + routed.experts * tile / 2)
    rows = routed.rows * (2 * routed.hidden + 3 * routed.ffn) * e  # read and written by both products
    return max(flops / rates.matmul, (weights + rows) / rates.bandwidth)


def exchange_seconds(exchange: Exchange, hardware: Hardware) -> float:
    """Return the seconds of an exchange: an all-to-all, or an all-gather or reduce-scatter of all rows."""
    group = group_of(hardware, exchange.ranks, span=exchange.ranks * exchange.stride)
    return (all_to_all if exchange.to_each else ring_gather)(exchange.size, group)
