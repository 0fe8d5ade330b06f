"""Tars through megatron-energon: each rank its share, exact to resume, and nothing that a damaged sample could stop."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.schema import DatasetConfig
from megavlm.data.records import is_held_out, open_stream, open_tars, prepare_stream
from megavlm.data.records.containers import key_of_parts
from megavlm.data.records.tars import for_energon
from megavlm.data.types import Conversation, ImageRef, VideoRef
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.paths import FileRange
from tests.support.tar_shards import sample, write_shards, write_tar


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", count=3, each=20)
    return tmp_path / "data"


def opened(folder: Path, *, rank: int = 0, world: int = 1, seed: int = 7, **options: Any) -> Any:
    source = DatasetConfig(path=str(folder))
    run_dir = folder.parent / "run"
    prepare_stream(source, run_dir=run_dir)
    return open_stream(source, run_dir=run_dir, rank=rank, world=world, seed=seed, **options)


def said(item: Conversation | BadSample) -> str:
    return str(item.reason) if isinstance(item, BadSample) else str(item.turns[-1].parts[0])


def take(stream: Any, count: int) -> list[str]:
    return [said(item) for item in islice(iter(stream), count)]


def test_ranks_share_an_epoch(folder: Path) -> None:
    shares = [take(opened(folder, rank=rank, world=3), 20) for rank in range(3)]
    assert sorted(answer for share in shares for answer in share) == sorted(
        f"{shard}-{number}" for shard in range(3) for number in range(20)
    )


def test_what_is_held_out_is_the_same_for_all_ranks_and_by_number(folder: Path) -> None:
    items = [item for rank in range(3) for item in islice(iter(opened(folder, rank=rank, world=3, held_out=0.3)), 20)]
    trained = sorted(said(item) for item in items if item is not None)
    records = open_tars(DatasetConfig(path=str(folder)), cache=folder.parent / "unused")
    sides: dict[bool, list[str]] = {True: [], False: []}
    for number in range(len(records)):
        sides[is_held_out(records.key(number), 0.3)].append(said(records.read(number)))
    assert trained == sorted(sides[False])
    assert 8 < len(sides[True]) < 32
    assert sorted(sides[True] + sides[False]) == sorted(take(opened(folder), 60))
    assert records.label(21) == "1.tar/sample 1"


def test_samples_are_conversations_of_raw_bytes(folder: Path) -> None:
    stream = opened(folder)
    item = next(iter(stream))
    assert isinstance(item, Conversation)
    answer = said(item)
    assert item.images == (ImageRef(answer.encode() * 200),)
    shard, number = answer.split("-")
    assert stream.label == f"data/{shard}.tar/{shard}-{int(number):03}"


def test_the_order_is_the_seeds(folder: Path) -> None:
    first = take(opened(folder), 60)
    assert first == take(opened(folder), 60)
    assert first != take(opened(folder, seed=8), 60)
    assert first != sorted(first)
    plain = take(opened(folder, shuffle=False), 61)
    assert plain[:60] == [f"{shard}-{number}" for shard in range(3) for number in range(20)]
    assert plain[60] == plain[0]


@pytest.mark.parametrize("count", [0, 1, 37, 75])
def test_resuming_is_exact(folder: Path, count: int) -> None:
    stream = opened(folder)
    samples = iter(stream)
    for _ in range(count):
        next(samples)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = [said(item) for item in islice(samples, 50)]
    resumed = opened(folder)
    resumed.load_state_dict(state)
    assert json.loads(json.dumps(resumed.state_dict())) == state  # a stop right after starting loses nothing
    assert take(resumed, 50) == expected


def test_the_generator_of_dropout_stays_where_it_is(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_rng_state()
    take(opened(folder), 5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world": 3}, "2 data-parallel ranks and cannot go on with 3"),
        ({"rank": 1}, "position of data-parallel rank 0"),
        ({"seed": 8}, "--seed 7"),
        ({"shuffle": False}, "set --shuffle as it was"),
    ],
)
def test_other_topologies_are_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    state = opened(folder, world=2).state_dict()
    with pytest.raises(UserError, match=message):
        opened(folder, **{"world": 2, **change}).load_state_dict(state)


def test_other_data_and_broken_states_are_refused(folder: Path) -> None:
    stream = opened(folder)
    next(iter(stream))
    state = stream.state_dict()
    with pytest.raises(UserError, match="unreadable position"):
        opened(folder).load_state_dict({**state, "state": {"Popen": {"args": "ls"}}})
    write_shards(folder.parent / "more", count=4, each=20)
    with pytest.raises(UserError, match="other tars"):
        opened(folder.parent / "more").load_state_dict(state)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_tar_that_is_cut_costs_the_cut_sample(folder: Path, prepared: bool) -> None:
    """Before it was indexed the rest is not known of; afterwards each lost sample is counted."""
    if prepared:
        opened(folder)
    path = folder / "1.tar"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 300])
    found = take(opened(folder), 500)
    kept = {answer for answer in found if answer.startswith("1-")}
    assert 5 < len(kept) < 15
    epoch = 60 if prepared else 40 + len(kept) + 1
    assert found[:epoch].count(Reason.TRUNCATED) == epoch - 40 - len(kept)
    assert {f"{shard}-{number}" for shard in (0, 2) for number in range(20)} < set(found)


def test_a_tar_that_is_gone_costs_its_samples(folder: Path) -> None:
    opened(folder)
    (folder / "1.tar").unlink()
    stream = opened(folder)
    labels = [stream.label for item in islice(iter(stream), 60) if said(item) == Reason.MISSING]
    assert sorted(labels) == [f"data/1.tar/sample {number}" for number in range(20, 40)]


def test_bad_samples_are_counted_and_passed_over(tmp_path: Path) -> None:
    good = sample("good")
    samples = [good, {"json": b"\x00\x01garbage", "jpg": b"x"}, {"json": good["json"]}, {"jpg": b"x"}, good]
    write_tar(tmp_path / "data" / "0.tar", samples)
    (tmp_path / "data" / "1.tar").write_bytes(b"not a tar" * 200)
    found = take(opened(tmp_path / "data", shuffle=False), 6)
    assert found == ["good", "not_a_record", "image_count", "not_a_record", "good", "truncated"]


def test_the_code_beside_a_prepared_folder_is_not_run(folder: Path) -> None:
    opened(folder)
    (folder / ".nv-meta" / "dataset.yaml").write_text("__module__: os\n__class__: system\n")
    (folder / ".nv-meta" / "sample_loader.py").write_text("raise SystemExit\n")
    assert len(take(opened(folder), 3)) == 3


def test_what_cannot_be_opened_is_one_line(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="is not a file or folder"):
        opened(tmp_path / "nowhere")
    with pytest.raises(UserError, match="name each of its folders of tars, with weight="):
        opened(tmp_path / "blend.yaml")
    prepared = DatasetConfig(str(tmp_path), kind="webdataset")
    with pytest.raises(UserError, match="megatron-energon can open") as caught:
        open_stream(prepared, run_dir=tmp_path, rank=0, world=1, seed=0)
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(UserError, match="60 samples for 64 data-parallel ranks"):
        opened(folder, world=64)
    monkeypatch.setitem(sys.modules, "megavlm.data.records.energon", None)
    with pytest.raises(UserError, match="pip install"):
        opened(folder)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket/a/b", "msc://_s3-bucket/a/b"),
        ("gs://bucket/a.tar", "msc://_gs-bucket/a.tar"),
        ("msc://mine/a", "msc://mine/a"),
    ],
)
def test_a_bucket_is_the_profile_that_is_made_of_it(url: str, place: str) -> None:
    from multistorageclient.shortcuts import _resolve_non_msc_url

    assert for_energon(url) == place
    if not url.startswith("msc"):
        assert "msc://{}/{}".format(*_resolve_non_msc_url(url)) == place


def test_clips_stay_in_their_tar(tmp_path: Path) -> None:
    """A stream and reading by number find the same bytes, and keys are those of the bytes."""
    spoken = [{"from": "human", "value": "<video>What?"}, {"from": "gpt", "value": "x"}]
    told = json.dumps({"conversations": spoken}).encode()
    samples = [{"json": told, "mp4": bytes([number]) * 700} for number in range(3)]
    path = write_tar(tmp_path / "data/0.tar", samples)
    streamed = list(islice(iter(opened(path.parent, shuffle=False)), 3))
    records = open_tars(DatasetConfig(str(path.parent)), cache=tmp_path)
    for number, item in enumerate(streamed):
        assert isinstance(item, Conversation)
        assert item == records.read(number)
        (video,) = item.images
        assert isinstance(video, VideoRef)
        assert isinstance(video.source, FileRange)
        with video.source.open() as file:
            assert file.read() == samples[number]["mp4"]
            assert (file.seek(-1, 2), file.read(5)) == (699, bytes([number]))
        assert records.key(number) == key_of_parts(samples[number])
