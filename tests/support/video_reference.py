"""What Transformers makes of conversations about clips, in a process of its own.

Its video processors need torchvision, of which they use a few functions on tensors. The process has them from
`tests/support/stand_in_packages`, because with the real one present Transformers chooses other image processors, and
because its wheels on PyPI are for CUDA. The stand-in was compared with torchvision 0.28: equal bytes with the bicubic
filter; with the Lanczos one, it calls the same function of torch. SmolVLM's processor needs num2words, of which a few
words are there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

STAND_IN = Path(__file__).with_name("stand_in_packages")


@dataclass(frozen=True)
class Task:
    """A conversation whose one video is `clip`, sampled as `sampling` says.

    `name` is the case of `tests/support/processors.py` whose processor is taken; `folder` holds its tokenizer and
    `video_preprocessor_config.json`.
    """

    name: str
    folder: str
    messages: list[Any]
    clip: str
    sampling: dict[str, Any] = field(default_factory=dict)
    kind: str = ""  # the class of the processor, if it is not that of the case
    # (frames, frames per second) of clips; "frames" among the inputs are those that are taken of each
    lengths: Sequence[tuple[int, float]] = ()


def references(tasks: Sequence[Task], out: Path) -> list[dict[str, Any]]:
    """Return the inputs of the Transformers models for each task; files of them are left in the folder `out`."""
    import torch

    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{STAND_IN}", "OMP_NUM_THREADS": "1"}
    given = json.dumps([asdict(task) for task in tasks])
    program = [sys.executable, "-m", "tests.support.video_reference", given, str(out)]
    subprocess.run(program, env=environment, check=True, cwd=root, timeout=300)
    return [torch.load(out / f"{number}.pt") for number in range(len(tasks))]


def inputs_of(task: Task) -> dict[str, Any]:
    import torch
    import transformers
    from transformers.video_utils import VideoMetadata, load_video

    from tests.support.processors import CASES

    case = CASES[task.name]
    fixed = {"cap_pixels_per_frame": False} if task.name.startswith(("qwen", "exaone")) else {}
    if task.name == "muse":  # whose processor reads it, and does not ask for it
        fixed = {"return_metadata": True}
    videos = transformers.AutoVideoProcessor.from_pretrained(task.folder, **fixed)
    processor = getattr(transformers, task.kind, case.kind)(
        image_processor=case.image_processor,
        tokenizer=transformers.AutoTokenizer.from_pretrained(task.folder, extra_special_tokens=case.marks),
        video_processor=videos,
        chat_template=case.template,
        **case.options,
    )
    pairs = {"temporal_patch_size": 2} if task.name == "muse" else {}
    sample = partial(videos.sample_frames, **task.sampling, **pairs)
    frames, metadata = load_video(task.clip, backend="pyav", sample_indices_fn=sample)
    text = processor.apply_chat_template(task.messages, tokenize=False)
    made = processor(
        **{"text": [text], "videos": [frames], "video_metadata": [metadata], "do_sample_frames": False},
        **{"add_special_tokens": not text.startswith("<bos>"), "return_tensors": "pt"},
    )
    clips = [VideoMetadata(count, fps=rate, duration=count / rate) for count, rate in task.lengths]
    taken = [[int(number) for number in sample(metadata=clip)] for clip in clips]
    return {"frames": taken, **{name: torch.as_tensor(value) for name, value in made.items()}}


def main(tasks: str, out: str) -> None:
    import torch

    for number, task in enumerate(json.loads(tasks)):
        torch.save(inputs_of(Task(**task)), Path(out) / f"{number}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
