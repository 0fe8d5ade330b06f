"""The whole way of a record with a video: a clip beside the records, a Hugging Face folder, logits.

Transformers takes the same clip through its own decoder, sampling, video processor, template and model.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("av", reason="pip install av (the extra `video`)")

from megavlm.config.schema import DataConfig, DatasetConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.files import FilesSource
from megavlm.data.types import Segment
from tests.support import hf
from tests.support.clips import clip
from tests.support.harness import Single, assert_same
from tests.support.processors import picture
from tests.support.video_reference import reference
from tests.support.whole_models import whole_folder

OPTIONS = {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "patch_size": 14,
    "size": {"shortest_edge": 4 * 28**2, "longest_edge": 16 * 28**2},
}


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen2-vl"])
def test_a_clip_gives_the_logits_that_transformers_gives(name: str, single: Single, tmp_path: Path) -> None:
    folder, theirs, _ = whole_folder(name, tmp_path)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(OPTIONS))
    shown = [picture(100, 130, seed=number) for number in range(33)]
    (tmp_path / "it.mp4").write_bytes(clip(33, rate=12, frames=shown))
    turns = [{"from": "human", "value": "<video>\nWhat happens?"}, {"from": "gpt", "value": "A cat is blue."}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"video": "it.mp4", "conversations": turns}))

    config = hf.config_for(folder, seq_length=256)
    data = DataConfig(datasets=(DatasetConfig(path=str(tmp_path / "train.jsonl")),), video_max_tokens=10**6)
    config = replace(config, data=replace(data, video_fps=4.0))
    source = FilesSource(config)
    (encoded,) = source.encode(0).samples
    sample = source.load(Segment(0, encoded))
    batch = collate([[sample]], CollateSpec.of(config, source, seq_length=256))
    (logits,) = hf.engine_for(config, folder, single).schedule.logits([batch])

    messages: list[Any] = [
        {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What happens?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat is blue."}]},
    ]
    inputs = reference(name, folder, messages, tmp_path / "it.mp4", fps=4.0)
    assert inputs["input_ids"][0].tolist() == sample.tokens.tolist()
    (groups, *grid), length = inputs["video_grid_thw"][0].tolist(), len(sample)
    assert batch.image_sizes.grids == (tuple(grid),) * groups == ((6, 8),) * 5
    assert batch.images is not None
    blocks = batch.images.patches.view(groups, grid[0] // 2, 2, grid[1] // 2, 2, -1).transpose(2, 3)
    torch.testing.assert_close(blocks.flatten(0, 4), inputs["pixel_values_videos"], rtol=1e-5, atol=2e-6)
    kinds = ("mm_token_type_ids", "video_grid_thw", "second_per_grid_ts")
    asked = {kind: inputs[kind] for kind in kinds if kind in inputs}
    positions, _ = theirs.model.get_rope_index(inputs["input_ids"], **asked)
    assert batch.text.positions[:, 0, :length].tolist() == positions[:, 0].tolist()
    assert (np.diff(np.unique(positions[0, inputs["mm_token_type_ids"] == 2])) >= 1).all()
    with torch.no_grad():
        expected = theirs(**inputs, use_cache=False).logits
    assert_same(logits[:, :length], expected, tolerance=hf.LOGITS, what="logits")
