"""The time at which a device gets to a point of a step, without letting the host wait for it."""

from __future__ import annotations

from typing import Any

import torch

from megavlm.resilience.phases import Clock, HostClock


class DeviceClock:
    """CUDA events on the computing stream."""

    def moment(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, moment: Any) -> bool:
        return bool(moment.query())

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the seconds between two events; both must have passed."""
        return float(earlier.elapsed_time(later)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()
