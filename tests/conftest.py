"""Settings that every test and every process it starts inherits; set before torch is imported."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # distributed tests run several processes on few cores
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # megatron-core compiles at import otherwise

# No property is about time, and on a busy machine an example may take longer than hypothesis's 200 ms.
settings.register_profile("megavlm", deadline=None)
settings.load_profile("megavlm")
