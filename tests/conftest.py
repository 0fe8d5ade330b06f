"""Settings that every test and every process it starts inherits; set before torch is imported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # distributed tests run several processes on few cores
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # megatron-core compiles at import otherwise
