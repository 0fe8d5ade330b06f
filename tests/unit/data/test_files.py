"""What is wrong with samples and what is said of it; pictures as they are cut; when data are those of a checkpoint."""

from __future__ import annotations

import io
import json
import re
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from megavlm.command_line.parsing import parse
from megavlm.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    DatasetConfig,
    ModelConfig,
    ProjectorConfig,
    VisionConfig,
)
from megavlm.data.collate import CollateSpec
from megavlm.data.collator import collate_segments
from megavlm.data.file_source import FilesSource
from megavlm.data.loader import RankLoader
from megavlm.data.preprocessors import processor_for, tokenizer_for
from megavlm.data.records import data_identity, difference
from megavlm.data.survey import data_table
from megavlm.data.types import HeldOut, SampleId, Segment
from megavlm.data.workers import WorkerPool
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import REMEDIES, Reason, Skipped, SkipSummary
from megavlm.inputs.patches import patchify
from tests.support.data_files import record, sources_of, write_all, write_tokenizer
from tests.support.tokenizers import SPECIALS, byte_level, llama
from tests.support.training import SMALL

ASK = "<image>\nwhat is this ?"


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(*shape: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


JPEG = encoded(noise(40, 30, 3), "JPEG")
# What is in the folder of images.
IMAGES = {
    "good.jpg": JPEG,
    "pixel.png": encoded(noise(1, 1, 3), "PNG"),
    "cut.jpg": JPEG[: len(JPEG) // 2],
    "text.png": b"this is no image at all",
}
# A line of the data set, and why it is left out; None: it is not.
LINES: dict[str | bytes, Reason | None] = {
    record(ASK, image="good.jpg"): None,
    record(ASK, image="pixel.png"): None,
    record(ASK, image="cut.jpg"): Reason.TRUNCATED,
    record(ASK, image="text.png"): Reason.NOT_AN_IMAGE,
    record(ASK, image="gone.jpg"): Reason.MISSING,
    record(ASK, image="../secret.jpg"): Reason.OUTSIDE,
    record(ASK, image="/etc/passwd"): Reason.OUTSIDE,
    record("<image> <image> which ?", image="good.jpg"): Reason.IMAGE_COUNT,
    record("what is <|im_start|> ?"): None,
    json.dumps({"conversations": [{"from": "human", "value": "where ?"}]}): Reason.EMPTY,
    json.dumps({"conversations": [{"from": "martian", "value": "where ?"}]}): Reason.ROLE,
    record("the cat " * 60): Reason.TOO_LONG,
    b"\x00\xff\xfe garbage \x80": Reason.NOT_A_RECORD,
    "[1, 2": Reason.NOT_A_RECORD,
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    write_tokenizer(folder / "tokenizer")
    (folder / "images").mkdir()
    (folder / "secret.jpg").write_bytes(JPEG)
    for name, content in IMAGES.items():
        (folder / "images" / name).write_bytes(content)
    lines = [line if isinstance(line, bytes) else line.encode() for line in LINES]
    (folder / "train.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "book.txt").write_text("the cat sits on the mat .\n")
    return folder


def config_for(folder: Path, *more: str) -> Config:
    flags = ["--seq-length", "96", "--packing-window", "16", "--num-workers", "0", *more]
    return parse([*SMALL, *sources_of(folder), *flags])


def in_order(folder: Path) -> FilesSource:
    config = config_for(folder, "--no-shuffle")
    return FilesSource(replace(config, data=replace(config.data, datasets=config.data.datasets[:1])))


@pytest.mark.parametrize(("number", "reason"), enumerate(LINES.values()))
def test_each_sample_is_used_or_has_its_reason(broken: Path, number: int, reason: Reason | None) -> None:
    source = in_order(broken)
    record = source.encode(number)
    found = [skip.reason for skip in record.skipped]
    rows = [tuple(Segment(number, sample) for sample in record.samples)]
    made = collate_segments(source, rows, spec=CollateSpec.of(config_for(broken), source))
    found += [skip.reason for skip in made.skipped]
    assert found == ([] if reason is None else [reason])
    assert all(skip.label == f"train.jsonl:{number + 1}" for skip in (*record.skipped, *made.skipped))
    assert (made.batch.text.num_tokens > 0) == (reason is None)
    assert torch.isfinite(made.batch.images.patches).all()
    assert len(made.batch.images.patches) == made.batch.image_sizes.num_patches


def test_workers_give_what_the_thread_gives(tmp_path: Path) -> None:
    config = config_for(write_all(tmp_path, samples=24))
    source = FilesSource(config)
    spec = replace(CollateSpec.of(config, source), dtype=torch.bfloat16)
    given = {"dp_rank": 1, "dp_size": 2, "micro_batch_size": 1, "balance": True}
    with ExitStack() as opened:
        pool = opened.enter_context(closing(WorkerPool(source, 1, timeout=300)))
        collators = [source.collator(spec), source.collator(spec, pool=pool)]
        loaders = [RankLoader(source.sampler(config, collator), collator, **given) for collator in collators]
        for loader in loaders:
            opened.callback(loader.close)
        steps = [tuple(loader.next_step() for loader in loaders) for _ in range(3)]
    for first, second in steps:
        assert first.imbalance == second.imbalance is not None
        for ours, theirs in zip(first.batches, second.batches, strict=True):
            assert ours.image_sizes == theirs.image_sizes
            assert ours.images.sizes == theirs.images.sizes
            assert ours.images.patches.dtype == theirs.images.patches.dtype == torch.bfloat16
            assert torch.equal(ours.images.patches, theirs.images.patches)
            for name, value in vars(ours.text).items():
                other = getattr(theirs.text, name)
                assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


def test_records_that_cannot_be_used_are_counted_after_one_pass(tmp_path: Path) -> None:
    """A record that comes 16 times in a window is encoded once."""
    config = config_for(write_all(tmp_path, samples=4))
    long = replace(config.train, seq_length=4)
    data = replace(config.data, datasets=config.data.datasets[:1], packing_window=64)
    source = FilesSource(replace(config, data=data, train=long))
    with patch.object(source, "encode", wraps=source.encode) as encode:
        sampler = source.sampler(source.config, source.collator(CollateSpec.of(config, source)))
        with pytest.raises(UserError, match="none of the 4 records can be used: 4 × too_long"):
            sampler.batch_at(sampler.start)
        sampler.close()
    assert encode.call_count <= 8, "two windows are encoded, one ahead"


def test_shares_are_told_before_a_run(broken: Path) -> None:
    config = config_for(broken)
    first, *rows, last, skipped = data_table(config, FilesSource(config)).splitlines()
    assert first.split()[:2] == ["data", "records"]
    assert [row.split()[:4] for row in rows] == [["train", "14", "75.0%", "about"], ["book", "1", "25.0%", "about"]]
    held = float(re.search(r"samples in a sequence: about ([\d.]+)", last)[1])  # type: ignore[index]
    epochs = float(rows[0].split()[4])
    drawn = config.train.train_iters * config.train.global_batch_size * held
    assert epochs == pytest.approx(0.75 * drawn / 14, rel=0.1)
    assert re.match(r"\d+ of the first 1[45] records are skipped: \d × \w+, as ", skipped)


def test_validation_on_what_is_trained_on_is_a_warning(broken: Path) -> None:
    for name, told in (("train.jsonl", ["--validation train is also in --datasets"]), ("book.txt", [])):
        config = config_for(broken)
        data = replace(config.data, datasets=config.data.datasets[:1], validation=(DatasetConfig(str(broken / name)),))
        warnings = FilesSource(replace(config, data=data)).warnings()
        assert [warning.split(":")[0] for warning in warnings] == told


def test_a_picture_that_is_not_read_is_a_warning(tmp_path: Path) -> None:
    """A model would learn to answer blind."""
    config = config_for(write_all(tmp_path, samples=1))
    rows = {"image_path": "a.jpg", "question": "what ?", "answer": "a cat"}
    (tmp_path / "vqa.csv").write_text(",".join(rows) + "\n" + ",".join(rows.values()))
    warnings = []
    for columns in (None, {"image": "image_path"}):
        datasets = (DatasetConfig(path=str(tmp_path / "vqa.csv"), columns=columns),)
        warnings += FilesSource(replace(config, data=replace(config.data, datasets=datasets))).warnings()
    assert len(warnings) == 1
    assert warnings[0].startswith("--datasets vqa: image_path is not read, and no image: to read it as one, add column")


MISTAKES = (
    (["--tokenizer", "none"], "--tokenizer"),
    (["--tokenizer", "/nowhere"], "--tokenizer /nowhere"),
    (["--image-processor", "/nowhere"], "--image-processor /nowhere"),
    (["--chat-template", "nonsense"], "--chat-template nonsense"),
    (["--set", "model.projector.anyres_max_tiles=4"], "--image-processor"),
    (["--set", "model.language.vocab_size=8"], "--tokenizer"),
)


@pytest.mark.parametrize(("flags", "named"), MISTAKES)
def test_mistakes_name_the_option(broken: Path, flags: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        FilesSource(config_for(broken, *flags))


def skipped(reason: Reason, number: int, *, partly: bool = False) -> Skipped:
    return Skipped(f"a.json[{number}]", "a", reason, f"detail {number}", partly)


def test_ranks_count_together() -> None:
    one = SkipSummary().add([skipped(Reason.MISSING, 1), skipped(Reason.TOO_LONG, 2), skipped(Reason.TOO_LONG, 3)])
    two = SkipSummary().add([skipped(Reason.MISSING, 4), skipped(Reason.MISSING, 5, partly=True)])
    assert one.message().startswith("2 × too_long, as a.json[2]: detail 2. To fix it, raise --seq-length")
    both = SkipSummary().merged([one, two]).add([skipped(Reason.MISSING, 6)])
    assert both.message().startswith("3 × missing_file, as a.json[1]: detail 1. To fix it, name the folder")
    assert one.counts[Reason.MISSING] == 1


def test_every_reason_has_a_remedy() -> None:
    assert REMEDIES.keys() < set(Reason)
    for reason in Reason:
        assert "To fix it, " in SkipSummary().add([skipped(reason, 0)]).message()


def identity(*argv: str) -> dict[str, Any]:
    """Return the identity of the data as a checkpoint has it, through JSON."""
    return dict(json.loads(json.dumps(data_identity(parse(argv)))))


def write(path: Path, records: list[str]) -> Path:
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in records))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "a.jsonl", [f"text {number:05d}" for number in range(5000)])


def test_a_moved_file_is_the_same_data(file: Path, tmp_path: Path) -> None:
    before = identity("--datasets", str(file))
    (tmp_path / "elsewhere").mkdir()
    assert difference(before, identity("--datasets", str(file.rename(tmp_path / "elsewhere/a.jsonl")))) is None


@pytest.mark.parametrize("record", [0, 4999])
def test_other_records_of_the_same_size_are_other_data(file: Path, record: int) -> None:
    before = identity("--datasets", str(file))
    records = [f"text {number:05d}" for number in range(5000)]
    records[record] = "TEXT 12345"
    write(file, records)
    assert "a has other files or other records (a.jsonl)" in str(difference(before, identity("--datasets", str(file))))


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--seed", "5"], "--seed 1234, but this run has 5"),
        (["--no-shuffle"], "--shuffle True, but this run has False"),
        (["--no-packing"], "--packing True, but this run has False"),
        (["--train-on", "last"], "--train-on 'assistant', but this run has last"),
        (["--set", "data.enable_thinking=false"], "data.enable_thinking null, but this run has False"),
        (["--image-processor", "models/a"], "--image-processor null, but this run has a"),
    ],
)
def test_the_option_that_changed_is_named(file: Path, argv: list[str], named: str) -> None:
    assert difference(identity("--datasets", str(file)), identity("--datasets", str(file), *argv)) == named


def test_the_option_of_computed_samples_that_changed_is_named() -> None:
    assert difference(identity(), identity()) is None
    assert "--images-per-sample [1]" in str(difference(identity(), identity("--images-per-sample", "2", "1")))
    heard = ("--set", "model.audio.num_layers=2", "model.audio_token=9", "data.sound_frames=[9]")
    assert "data.sound_frames [], but this run has [9]" in str(difference(identity(), identity(*heard)))


def test_other_weights_number_and_files_of_data_sets_are_other_data(file: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "b.jsonl", ["x"])
    before = identity("--datasets", str(file), str(other))
    assert "weight null, not 2.0" in str(difference(before, identity("--datasets", f"{file},weight=2", str(other))))
    assert difference(identity("--datasets", f"{file},weight=1"), identity("--datasets", str(file))) is None
    mapped = identity("--datasets", f"{file},columns=text:words", str(other))
    assert "columns null, not {" in str(difference(before, mapped))
    assert "2, not 1" in str(difference(before, identity("--datasets", str(file))))
    assert "name 'a', not 'b'" in str(difference(before, identity("--datasets", str(other), str(file))))


@pytest.mark.parametrize("saved", [{}, {"--datasets": 1}, {"--datasets": None}, {"--seed": [[]]}])
def test_whatever_a_checkpoint_says_is_compared(file: Path, saved: dict[str, Any]) -> None:
    assert (difference(saved, identity("--datasets", str(file))) is None) == (saved == {})


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    patch_size=st.sampled_from([1, 2, 7]),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_a_linear_layer_on_patches_is_the_convolution(rows, columns, patch_size, channels, seed):
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, size=(rows * patch_size, columns * patch_size, channels), dtype=np.uint8)
    weight = torch.from_numpy(rng.standard_normal((5, channels, patch_size, patch_size)))
    normalised = (torch.from_numpy(image).permute(2, 0, 1).double() / 255 - 0.5) / 0.5

    expected = torch.nn.functional.conv2d(normalised[None], weight, stride=patch_size)[0]  # [5, rows, columns]
    patches = patchify(image, patch_size)
    assert patches.dtype == torch.float32
    assert patches.shape == (rows * columns, channels * patch_size**2)
    torch.testing.assert_close(patches.double() @ weight.flatten(1).T, expected.flatten(1).T, rtol=1e-5, atol=1e-5)


def test_mean_and_std_normalise_the_unit_interval() -> None:
    image = np.array([[[0], [255]]], dtype=np.uint8)
    torch.testing.assert_close(patchify(image, 1, mean=0.25, std=0.1), torch.tensor([[-2.5], [7.5]]))


BOTH = "data.augment_crop=0.5 data.augment_color=0.4".split()


def test_images_change_with_the_epoch_and_with_nothing_else(tmp_path: Path) -> None:
    folder = write_all(tmp_path, samples=2)
    names = sorted(path.name for path in (folder / "images").iterdir())
    lines = [
        record("<image>\nwhat is this ?", image=names[0]),
        record("<image>\nis [1, 2, 30, 40] red ?", image=names[0]),
    ]
    (folder / "train.jsonl").write_text("\n".join(lines))

    def source(*options: str) -> FilesSource:
        data = [*sources_of(folder)[:2], *sources_of(folder)[-2:], "--no-shuffle", "--num-workers", "0"]
        data += ["--validation", data[1]]
        return FilesSource(parse([*SMALL, *data, *(["--set", *options] if options else [])]))

    def patches(made: FilesSource, sample: SampleId) -> Tensor:
        [encoded] = made.encode(sample).samples
        return made.load(Segment(sample, encoded)).images[0].patches()

    plain, cropped, both = source(), source("data.augment_crop=0.5"), source(*BOTH)
    assert torch.equal(patches(both, 0), patches(source(*BOTH), 0))
    assert patches(both, 0).shape == patches(plain, 0).shape
    for changed in (cropped, both):
        assert not torch.equal(patches(changed, 0), patches(plain, 0))
        assert not torch.equal(patches(changed, 0), patches(changed, 2)), "the same record in the next epoch"
    assert torch.equal(patches(plain, 0), patches(plain, 2))
    assert torch.equal(patches(cropped, 1), patches(plain, 1)), "its text has a box"
    assert not torch.equal(patches(both, 1), patches(plain, 1)), "which colours do not move"
    held_out = [made.load(Segment(HeldOut(0, 0), made.encode(0).samples[0])).images[0] for made in (both, plain)]
    assert torch.equal(*(image.patches() for image in held_out)), "validation sees whole images"


QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 4 * 28**2, "max_pixels": 64 * 28**2}
MERGED = ModelConfig(vision=VisionConfig(patch_size=14), projector=ProjectorConfig(pixel_shuffle=2))


def config(folder: Path, **data: int) -> Config:
    return Config(model=MERGED, checkpoint=CheckpointConfig(init_from=str(folder)), data=DataConfig(**data))  # type: ignore[arg-type]


def write_images(folder: Path, options: dict[str, object]) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(options))
    return folder


def test_a_half_downloaded_folder_is_named_with_the_file_that_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no preprocessor_config\.json .*complete the download"):
        processor_for(config(tmp_path))
    with pytest.raises(UserError, match=r"has no tokenizer\.json .*complete the download"):
        tokenizer_for(config(tmp_path))
    assert processor_for(Config(model=MERGED)).layout(100, 100).size == (100, 100), "random weights need no file"


@pytest.mark.parametrize(
    ("bounds", "features"),
    [({}, 36), ({"max_pixels": 16 * 28**2}, 16), ({"min_pixels": 49 * 28**2}, 49), ({"max_pixels": 2**24}, 36)],
)
def test_bounds_of_the_area_resize_an_image(bounds: dict[str, int], features: int, tmp_path: Path) -> None:
    assert processor_for(config(write_images(tmp_path, QWEN), **bounds)).layout(6 * 28, 6 * 28).features == features


def test_settings_in_the_newer_file_take_precedence(tmp_path: Path) -> None:
    """Transformers 5 saves it, and leaves an older preprocessor_config.json of the folder where it is."""
    folder = write_images(tmp_path, QWEN)
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": {**QWEN, "max_pixels": 16 * 28**2}}))
    assert processor_for(config(folder)).layout(6 * 28, 6 * 28).features == 16


def test_bounds_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 50176 and at most 50175 pixels"):
        processor_for(config(write_images(tmp_path, {**QWEN, "min_pixels": 64 * 28**2}), max_pixels=50175))
    clip = write_images(tmp_path, {"image_processor_type": "CLIPImageProcessor", "size": 224, "crop_size": 224})
    with pytest.raises(UserError, match=r"--max-pixels is for models that see images at their own size \(Qwen's\)"):
        processor_for(config(clip, max_pixels=50176))


@pytest.mark.parametrize("nested", [False, True])
def test_a_wrong_option_is_told_with_its_file(tmp_path: Path, nested: bool) -> None:
    options = {**QWEN, "rescale_factor": 1e300}
    file = tmp_path / ("processor_config.json" if nested else "preprocessor_config.json")
    file.write_text(json.dumps({"image_processor": options} if nested else options))
    with pytest.raises(UserError, match=rf"^{file}: rescale_factor 1e\+300 must be a number"):
        processor_for(config(tmp_path))


def test_a_tokenizer_of_another_family_is_refused(tmp_path: Path) -> None:
    """Its tokens are numbers of other words: such a run trains, and forgets what the model knew."""
    specials = SPECIALS["qwen"].split()
    saved = {"own": byte_level(specials), "more": byte_level((*specials, "<audio>")), "other": llama()}
    for name, backend in saved.items():
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>" if name != "other" else "</s>")
        fast.save_pretrained(tmp_path / name)

    def run(tokenizer: str, start: dict[str, str]) -> Config:
        return Config(checkpoint=CheckpointConfig(**start), data=DataConfig(tokenizer=str(tmp_path / tokenizer)))  # type: ignore[arg-type]

    for option in ("init_from", "language_from"):
        start = {option: str(tmp_path / "own")}
        assert tokenizer_for(run("more", start)).vocab_size > 256, "more tokens, and plain text as before"
        with pytest.raises(UserError, match=r"other is of another family than the model in .*own: .*leave --tokenizer"):
            tokenizer_for(run("other", start))
    (tmp_path / "bare").mkdir()
    assert tokenizer_for(run("other", {"init_from": str(tmp_path / "bare")})), "a folder without one says nothing"
    assert tokenizer_for(run("other", {})), "nor do random weights"
