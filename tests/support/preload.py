"""What the fork server imports once for all its children (`tests/support/forked.py`).

A fork copies one thread, and no CUDA device that was looked at before: nothing here may start threads, join a process
group or ask for a device.
"""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path

import torch

torch.set_num_threads(1)
warnings.simplefilter("ignore")

if not Path("/proc/driver/nvidia").exists():  # else each child asks for its device and imports the rest itself
    from megavlm import backend

    backend.activate()  # before megatron-core is imported

    # What the program imports when it is called, and torch in the first step.
    import torch._dynamo

    import megavlm.programs.train
    import megavlm.train.build
    import megavlm.train.loop  # noqa: F401

threads = len(os.listdir("/proc/self/task"))
assert threads == 1, f"{threads} threads: what the others hold would stay locked in every child"

# Children share what is imported: a collection that looked at it would copy its pages into each of them.
gc.collect()
gc.freeze()
