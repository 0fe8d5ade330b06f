"""An encoder's passes are as long as the device wants them, in the plan as in the run."""

from __future__ import annotations

from dataclasses import replace

from megavlm.arch.dims import dims_of
from megavlm.planner.auto import predict
from megavlm.planner.hardware import PROFILES
from tests.support.flags import resolved

# 32 images of 1,024 patches in a step: passes of 4 images on a CPU, of 16 on a GPU.
FLAGS = (
    "--placement colocated --set model.vision.image_size=64 model.vision.patch_size=2 --image-sizes 64 "
    "--images-per-sample 1 --seq-length 1536 --gbs 32 --mbs 1 --set model.vision.num_layers=4 "
    "model.vision.hidden_size=64 model.vision.ffn_hidden_size=128 model.vision.num_attention_heads=4 "
    "model.language.num_layers=1 model.language.hidden_size=32"
)
COLOCATED = resolved([*FLAGS.split(), "--set", "model.language.vocab_size=256"])


def test_memory_follows_the_default_of_the_device_that_is_planned_for() -> None:
    found = {}
    for name, own in (("cpu", 4096), ("h100", 16384)):
        for patches in (None, 4096, 16384):
            placement = replace(COLOCATED.placement, encoder_chunk_patches=patches)
            config = replace(COLOCATED, placement=placement)
            found[patches] = predict(config, dims_of(config, world=1), PROFILES[name])
        assert found[None].memory == found[own].memory
        assert found[None].encoder == found[own].encoder
        kept = [found[patches].memory[0].activations for patches in (4096, 16384)]
        assert kept[1] > 2 * kept[0], "a pass's activations wait for its backward"
