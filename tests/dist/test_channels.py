"""Images of five channels, on a LLaVA of three: widened on import, trained on any layout, resumed, exported."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.pool import Pools

os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import transformers

from megavlm.checkpoint.hf.pretrained import Pretrained
from megavlm.families.shared.family import ALL_PARTS
from megavlm.programs import channels, convert
from tests.support.processors import picture
from tests.support.training import assert_same_curve, metrics, train_composed, without_wall_time
from tests.support.whole_models import whole_folder

RUN = (
    "--precision fp32 --train-iters 4 --lr-decay-iters 20 --lr-warmup-iters 1 --lr 1e-3 --global-batch-size 4 "
    "--micro-batch-size 1 --seq-length 96 --packing-window 12 --num-workers 0 --no-tensorboard --seed 3 "
    "--save-interval 0"
).split()
KERNEL = "model.vision_tower.embeddings.patch_embedding.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA; photos, and arrays whose first three channels are those photos; records of both."""
    root = tmp_path_factory.mktemp("channels")
    whole_folder("llava", root)
    rng = np.random.default_rng(0)
    records: dict[str, list[str]] = {"photos": [], "arrays": []}
    for number in range(16):
        photo = picture(28, 28, seed=number)
        Image.fromarray(photo).save(root / f"{number}.png")
        more = rng.normal(1000, 200, (28, 28, 2))
        np.save(root / f"{number}.npy", np.concatenate([photo / 255, more], axis=-1).astype(np.float32))
        turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": f"A {number} and two."}]
        for kind, suffix in (("photos", "png"), ("arrays", "npy")):
            records[kind].append(json.dumps({"image": f"{number}.{suffix}", "conversations": turns}))
    for kind, lines in records.items():
        (root / f"{kind}.jsonl").write_text("\n".join(lines))
    assert channels.main([str(root / "arrays.jsonl"), "--out", str(root / "channels.json")]) == 0
    values = json.loads((root / "channels.json").read_text())
    own = json.loads((root / "hf" / "preprocessor_config.json").read_text())
    values["mean"][:3], values["std"][:3] = own["image_mean"], own["image_std"]
    (root / "channels.json").write_text(json.dumps(values))
    return root


def flags(folder: Path, kind: str = "arrays") -> list[str]:
    given = [*RUN, "--init-from", str(folder / "hf"), "--datasets", str(folder / f"{kind}.jsonl")]
    if kind == "photos":
        return given
    return [*given, *"--vision-input array --set model.vision.in_channels=5".split(), *statistics(folder)]


def statistics(folder: Path) -> list[str]:
    return ["--channel-statistics", str(folder / "channels.json")]


@pytest.fixture(scope="module")
def whole(run_once, folder: Path) -> Path:
    return run_once(1, flags(folder), train_composed)


def test_a_widened_model_begins_with_the_numbers_of_the_given_one(pools: Pools, folder: Path, whole: Path) -> None:
    """Its new channels have weights of zero, and learn."""
    pools(1).run(train_composed, [*flags(folder, "photos"), "--no-save"], str(folder / "photos"))
    photos, arrays = metrics(folder / "photos"), metrics(whole)
    assert arrays[0]["loss"] == pytest.approx(photos[0]["loss"], rel=1e-6)
    assert arrays[-1]["loss"] != pytest.approx(photos[-1]["loss"], rel=1e-4), "the new channels are trained"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout"), [(4, "--tp 2 --pp 2 --vpp 2"), (2, "--tp 2 --placement colocated"), (2, "--num-workers 1")]
)
def test_any_layout_gives_the_numbers_of_one_process(pools, folder, whole, tmp_path, world, layout):
    pools(world).run(train_composed, [*flags(folder), *layout.split(), "--no-save"], str(tmp_path))
    assert_same_curve(metrics(tmp_path), metrics(whole))


def test_a_run_resumes_and_its_export_is_a_model_of_five_channels(pools, folder, whole, tmp_path):
    """Transformers loads it, and `--init-from` reads images as the run did, without being told."""
    pools(1).run(train_composed, [*flags(folder), "--train-iters", "2"], str(tmp_path / "halves"))
    pools(1).run(train_composed, flags(folder), str(tmp_path / "halves"))
    assert without_wall_time(metrics(tmp_path / "halves")) == without_wall_time(metrics(whole))
    out = tmp_path / "out"
    assert convert.main(["export", str(whole), str(out)]) == 0
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(out)
    assert theirs.config.vision_config.num_channels == 5
    assert theirs.state_dict()[KERNEL].shape[1] == 5
    assert theirs.state_dict()[KERNEL][:, 3:].abs().max() > 0
    again = [*RUN, "--init-from", str(out), "--datasets", str(folder / "arrays.jsonl"), "--no-save"]
    pools(1).run(train_composed, again, str(tmp_path / "again"))
    assert metrics(tmp_path / "again")[0]["loss"] < metrics(whole)[0]["loss"]


@pytest.mark.parametrize(
    ("how", "expected"), [("zeros", lambda w: (w, 0 * w[:, :2])), ("repeat", lambda w: (w * 0.6, w * 0.6))]
)
def test_new_channels_have_zeros_or_the_given_weights_in_turn(folder, how, expected):
    pretrained = replace(Pretrained.of(folder / "hf", *ALL_PARTS), new_channels=how)
    given = transformers.LlavaForConditionalGeneration.from_pretrained(folder / "hf").state_dict()[KERNEL]
    side = given.shape[-1]
    real = (given.shape[0], 5 * side**2)
    read = pretrained.read_slice("patch_embed.proj.weight", real, (slice(0, real[0]), slice(0, real[1])))
    torch.testing.assert_close(read, torch.cat(expected(given), dim=1)[:, :5].flatten(1))
    part = pretrained.read_slice("patch_embed.proj.weight", real, (slice(2, 5), slice(7, 4 * side**2)))
    torch.testing.assert_close(part, read[2:5, 7 : 4 * side**2])
