"""What Transformers makes of a conversation about a clip, in a process of its own.

Its video processors need torchvision, of which they use a few functions on tensors. The process has them from
`tests/support/torchvision_stand_in`, because with the real one present Transformers chooses other image processors, and
because its wheels on PyPI are for CUDA. The stand-in was compared with torchvision 0.28: equal bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

STAND_IN = Path(__file__).with_name("torchvision_stand_in")


def reference(name: str, folder: Path, messages: list[Any], clip: Path, **sampling: Any) -> dict[str, Any]:
    """Return the inputs of the Transformers model for `messages`, whose video is `clip`, sampled as `sampling` says.

    `name` is the case of `tests/support/processors.py` whose processor is taken.
    """
    import torch

    out = folder.parent / "reference.pt"
    task = {"name": name, "folder": str(folder), "messages": messages, "clip": str(clip), "sampling": sampling}
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{STAND_IN}", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "tests.support.video_reference", json.dumps(task), str(out)]
    subprocess.run(program, env=environment, check=True, cwd=root, timeout=300)
    found: dict[str, Any] = torch.load(out)
    return found


def main(task: dict[str, Any], out: str) -> None:
    import torch
    import transformers
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.video_utils import load_video

    from tests.support.processors import CASES

    case, folder = CASES[task["name"]], Path(task["folder"])
    options = json.loads((folder / "video_preprocessor_config.json").read_text())
    options.pop("video_processor_type")
    videos = Qwen2VLVideoProcessor(**options, cap_pixels_per_frame=False)
    processor = case.kind(
        image_processor=case.image_processor,
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        video_processor=videos,
        chat_template=case.template,
    )
    sample = partial(videos.sample_frames, **task["sampling"])
    frames, metadata = load_video(task["clip"], backend="pyav", sample_indices_fn=sample)
    text = processor.apply_chat_template(task["messages"], tokenize=False)
    made = processor(
        text=[text], videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
    )
    torch.save({**{name: torch.as_tensor(value) for name, value in made.items()}}, out)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
