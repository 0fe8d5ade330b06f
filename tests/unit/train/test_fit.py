from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megavlm.planner.hardware import Rates
from megavlm.train.calibration import TimedLayer, fit, predicted


def drawn(rates: Rates, *, noise: float) -> list[TimedLayer]:
    random = np.random.default_rng(1)
    samples = []
    for products, attention, traffic, calls in random.uniform((1e8, 0, 1e6, 1), (1e10, 2e9, 5e8, 20), (30, 4)):
        layer = TimedLayer(products, attention, traffic, calls, 1.0)
        samples.append(replace(layer, seconds=predicted(layer, rates) * random.uniform(1 - noise, 1 + noise)))
    return samples


def test_exact_times_give_the_rates_back() -> None:
    rates = Rates(6e10, 3e10, 4e9, 1e-4)
    assert vars(fit(drawn(rates, noise=0))) == pytest.approx(vars(rates), rel=1e-6)


def test_what_costs_nothing_is_not_negative() -> None:
    samples = drawn(Rates(6e10, 3e10, 1e18, 0.0), noise=0.05)
    found = fit(samples)
    assert min(vars(found).values()) >= 0
    assert max(abs(predicted(s, found) / s.seconds - 1) for s in samples) < 0.15


def test_attention_is_never_faster_than_products() -> None:
    """Times in which attention seems to cost nothing, as noise makes it: it is products at least."""
    found = fit(drawn(Rates(6e10, 1e18, 4e9, 1e-4), noise=0.05))
    assert found.attention == found.matmul < 1e11


def test_products_are_not_faster_than_the_device() -> None:
    """Times that memory and calls explain whole, as those of a GPU's layers, of which both are proportional."""
    samples = drawn(Rates(1e18, 1e18, 4e9, 1e-4), noise=0)
    assert fit(samples).matmul > 1e14
    found = fit(samples, peak=1e13)
    assert found.matmul <= 1e13
    assert max(abs(predicted(s, found) / s.seconds - 1) for s in samples) < 0.2
