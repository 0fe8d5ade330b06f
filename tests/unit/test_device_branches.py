"""Every file that asks which device it is on, and what runs the GPU's side of it without a GPU.

What only a GPU does, no CPU run tests. A new file that asks fails here until its line says how its answer is tested.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "megavlm"
QUESTION = re.compile(
    r"\bis_cpu\b|\bis_cuda\b|cuda\.is_available\(|device_at_hand\(|\bon_gpu=|loading_error\("
    r"|\.type [!=]= \"(?:cuda|cpu)\"|implementation\(config\)"
)

# The doctor, `arch` and the planner only report; tests/fake runs all of a step on a device that is not there.
ASKED = {
    "backend/__init__.py": "chooses the backend: tests/unit/backend/test_mcore_patches.py, tests/fake",
    "backend/accelerator.py": "events, peak memory: tests/unit/backend/test_accelerator.py, tests/fake",
    "backend/host_copies.py": "pins memory: tests/gpu/test_offload.py, tests/unit/data/test_workers.py",
    "backend/installed.py": "loads it or hides it: tests/unit/backend/test_mcore_patches.py",
    "checkpoint/staging.py": "waits for copies, pins memory: tests/fake (saved)",
    "programs/calibrate.py": "which rates are measured: tests/dist/test_calibrate.py runs the CPU's side alone",
    "rules/defaults.py": "the default that differs: tests/dist/test_gpu_defaults.py",
    "data/broadcast.py": "pins memory: tests/fake",
    "data/loader.py": "pins memory: tests/unit/pipeline/test_programs.py with stand-ins",
    "programs/model_options.py": "Transformers' device, or none: tests/parity/test_answers.py",
    "inputs/batch.py": "asks the host's tensors alone: tests/fake counts what a step waits for",
    "model/attention.py": "the size of a block: tests/unit/model/test_masks.py, several sizes",
    "model/delta_rule.py": "kernels in place of torch: tests/unit/model/test_delta_rule.py with stand-ins",
    "model/layer_modules.py": "Transformer Engine's: tests/parity/test_transformer_engine.py, test_gpu_defaults.py",
    "model/packing.py": "one call for all sequences: tests/unit/model/test_packing.py with a stand-in",
    "parallel/groups.py": "saves the GPU's random state beside the CPU's: tests/fake (saved)",
    "pipeline/encoder.py": "the size of a pass: tests/dist/test_gpu_defaults.py",
    "precision/device.py": "what a device can do: tests/unit/precision/test_capability.py",
    "train/build.py": "the default that differs",
    "train/loop.py": "the memory of a full device; without it tests/dist/test_errors.py",
    "train/calibration.py": "megavlm calibrate: tests/dist/test_calibrate.py runs the CPU's side alone",
    "train/outputs.py": "what a user is told",
    "train/hooks/trace.py": "what a profiler records: tests/gpu",
}


def test_every_named_test_is_there() -> None:
    for reason in ASKED.values():
        for name in re.findall(r"tests/[\w/.]+", reason):
            assert (ROOT.parent / name).exists(), name


def test_every_question_about_the_device_is_accounted_for() -> None:
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
    asking = {name for name, text in files.items() if QUESTION.search(text)}
    assert {name for name in asking if not name.startswith(("programs/doctor/", "arch/", "planner/"))} == set(ASKED)
