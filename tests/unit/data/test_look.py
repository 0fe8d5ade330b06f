"""What a planner is told of a run's data is what the run will read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megavlm.arch.workload import FIELDS, DataWindow
from megavlm.config.schema import Config, DataConfig, DatasetConfig
from megavlm.data.collate import CollateSpec
from megavlm.data.file_source import FilesSource
from megavlm.data.loader import RankLoader
from megavlm.data.survey import STEPS, data_window
from megavlm.data.synthetic import SyntheticSource
from megavlm.errors import UserError
from megavlm.inputs.batch import MicroBatch
from megavlm.planner.uneven import micro_batches
from megavlm.programs import plan
from megavlm.rules.defaults import resolve
from megavlm.rules.load import to_yaml
from tests.support.data_files import record, write_llava, write_tokenizer
from tests.support.small_run import SMALL

RECORDS = 600


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("look")
    path, images = write_llava(folder, samples=RECORDS), str(folder / "images")
    data = DataConfig(
        datasets=(DatasetConfig(path=str(path), image_root=images),),
        tokenizer=str(write_tokenizer(folder / "tokenizer")),
        packing_window=RECORDS,
        num_workers=0,
    )
    return replace(SMALL, data=data, train=replace(SMALL.train, seq_length=160, global_batch_size=8))


def looked(config: Config, records: int = RECORDS) -> DataWindow:
    source = FilesSource(config)
    return data_window(resolve(config, vocab_size=source.vocab_size), source, records=records)


@pytest.mark.parametrize("balance", [True, False])
def test_micro_batches_are_those_that_a_run_reads(config: Config, balance: bool) -> None:
    config = resolve(replace(config, data=replace(config.data, balance=balance)))
    source = FilesSource(config)
    batches = micro_batches(looked(config), dp=2, cp=1, size=2, colocated=False)
    for rank in range(2):
        collator = source.collator(CollateSpec.of(config, source))
        loader = RankLoader(
            source.sampler(config, collator),
            collator,
            dp_rank=rank,
            dp_size=2,
            micro_batch_size=2,
            balance=balance,
        )
        try:
            for step in range(STEPS):
                read = loader.next_step().batches
                for micro, batch in enumerate(read):
                    ours = dict(zip(FIELDS, batches.work[:, micro, step, rank], strict=True))
                    assert ours == pytest.approx(work_of(batch)), (step, micro)
                    assert batches.images[micro, step, rank] == batch.image_sizes.num_images
        finally:
            loader.close()


def work_of(batch: MicroBatch) -> dict[str, float]:
    """What a micro-batch of rows passes through the model."""
    grids = np.array(batch.image_sizes.grids).reshape(-1, 2).prod(axis=1)
    assert batch.text.trained_positions is not None
    rows, length = batch.text.tokens.shape
    bounds = np.arange(rows + 1) * length if batch.text.cu_seqlens is None else batch.text.cu_seqlens.numpy()
    lengths = np.diff(bounds.astype(float))
    return {
        "patches": grids.sum(),
        "patch_squares": (grids**2).sum(),
        "window_squares": 0,
        "features": batch.text.feature_positions.numel(),
        "tokens": batch.text.tokens.numel(),
        "token_squares": (lengths**2).sum(),
        "sliding_squares": 0,
        "trained_tokens": batch.text.trained_positions.numel(),
    }


def test_few_samples_make_many_batches(config: Config) -> None:
    few, again = looked(config, 20), looked(config, 20)
    assert few.records == 20
    assert looked(config, 10 * RECORDS).records == RECORDS, "no sample is looked at twice"
    assert few.work.shape == (STEPS, 8, len(FIELDS))
    assert np.array_equal(few.work, again.work), "always the same"
    assert len(np.unique(few.work.reshape(-1, len(FIELDS)), axis=0)) > 3
    assert few.total().tokens == pytest.approx(few.work[..., FIELDS.index("tokens")].sum() / STEPS, abs=1)


def test_synthetic_samples_are_looked_at_without_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataConfig(kind="synthetic", images_per_sample=(0, 3), image_sizes=(32, 64))
    config = resolve(replace(SMALL, data=data, train=replace(SMALL.train, global_batch_size=4)))
    source = SyntheticSource(config)
    monkeypatch.setattr(SyntheticSource, "_image", lambda self, index, *, number, side: _Shape(side))
    window = data_window(config, source, records=10**6)
    assert window.images.tolist() == [[0, 3, 0, 3]] * STEPS
    assert not window.balances, "what is computed goes in turn"
    sides = [[32, 64, 32], [64, 32, 64]]
    patches = [sum((side // config.model.vision.patch_size) ** 2 for side in each) for each in sides]
    assert window.work[0, [1, 3], FIELDS.index("patches")].tolist() == patches


class _Shape:
    """An image that has a size alone."""

    def __init__(self, side: int) -> None:
        self.grids = ((side // SMALL.model.vision.patch_size,) * 2,)


def test_a_plan_counts_the_data_that_its_configuration_names(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(given: Config, *flags: str) -> tuple[int, str, str]:
        (tmp_path / "run.yaml").write_text(to_yaml(given))
        narrow = "--gpus 2 --placement stages --recompute none --top 2 --no-offload"
        code = plan.main(["--config", str(tmp_path / "run.yaml"), *narrow.split(), *flags])
        return code, *capsys.readouterr()

    without = planned(replace(config, data=DataConfig(kind="synthetic")))
    code, found, _ = planned(config, "--look", "200")
    assert code == 0
    assert "looked at 200 samples" in found
    assert planned(config, "--look", "0") == without
    assert planned(config, "--images", "1x64")[1] != found
    assert "looked at" not in planned(config, "--images", "1x64")[1]
    missing = replace(config, data=replace(config.data, datasets=(DatasetConfig(path=str(tmp_path / "gone.jsonl")),)))
    code, found, _ = planned(missing)
    assert code == 0
    assert found.startswith("all micro-batches count as the average one, as the data are not looked at: --datasets ")
    assert found.partition("\n")[2] == without[1]
    assert planned(missing, "--look", "9")[0] == 2
    assert planned(replace(config, data=DataConfig(kind="synthetic")), "--look", "9")[2].startswith(
        "megavlm plan: --look"
    )
    assert planned(config, "--look", "-1")[2] == "megavlm plan: --look -1 must be at least 0\n"
    (given,) = config.data.datasets
    bare = replace(config, data=replace(config.data, datasets=()))
    named = ("--datasets", f"{given.path},image_root={given.image_root}")
    assert planned(bare, *named) == planned(config)
    assert planned(bare, "--datasets", str(tmp_path / "gone.jsonl"))[0] == 2
    assert planned(bare, *named, "--images", "1x64")[2].startswith("megavlm plan: --images says what samples hold")


def test_nothing_usable_is_an_error(config: Config, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("\n".join([record("<image>\nwhat is this ?", image="gone.jpg")] * 3))
    broken = replace(config, data=replace(config.data, datasets=(DatasetConfig(path=str(tmp_path / "bad.jsonl")),)))
    with pytest.raises(UserError, match="none of 3 samples can be used"):
        looked(broken, 3)
