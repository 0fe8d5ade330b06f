"""Programs and routes of ranks, on paper; a step's micro-batches and features on their way to a chunk."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

from megavlm.arch.dims import RowSplit
from megavlm.arch.image_tokens import features_of
from megavlm.arch.schedules import FORWARD, Pass, PipelineShape, rank_schedules
from megavlm.data import loader
from megavlm.errors import UserError
from megavlm.inputs.batch import ImageSizes, MicroBatch, SoundBatch, TextBatch
from megavlm.pipeline.colocated import feature_exchange_of, senders
from megavlm.pipeline.encoder import shard_size
from megavlm.pipeline.feature_cache import FeatureCache, encoder_hash
from megavlm.pipeline.micro_batches import on_device, own_part
from megavlm.pipeline.walker import Receive, Transfers, maker, rank_program, receiver
from tests.support.flags import resolved
from tests.support.host_copies import LateCopies
from tests.support.micro_batch import TOKENS, micro_batch
from tests.support.pipelines import SHAPES
from tests.support.training import SMALL

Program = list[Pass | Receive]


def programs_of(shape: PipelineShape) -> list[Program]:
    return [list(rank_program(shape, rank)) for rank in range(shape.pp)]


def test_what_is_sent_keeps_its_memory_when_the_output_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a send is under way, on another stream or kept by torch until it is waited for."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "isend", lambda tensor, **_: sent.append(tensor) or SimpleNamespace())
    group: Any = None
    output = 2 * torch.ones(4, requires_grad=True)
    Transfers(group, dtype=output.dtype, device=output.device).send(Pass(FORWARD, 0, 0), output, target=1)
    deallocate_output_tensor(output, True)
    assert output.numel() == 1
    assert sent[0].tolist() == [2.0] * 4


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES)
def test_a_rank_runs_the_schedules_passes_and_receives_what_they_need(shape: PipelineShape) -> None:
    for program, order in zip(programs_of(shape), rank_schedules(shape), strict=True):
        assert [each for each in program if isinstance(each, Pass)] == list(order)
        begun = set()
        for each in program:
            if isinstance(each, Receive):
                begun.add(each.made_by)
            elif (needed := maker(each, shape)) is not None:
                begun.remove(needed)  # begun before, and each is received once
        assert not begun


def ends(programs: list[Program], shape: PipelineShape) -> bool:
    """Return whether all ranks come to their end if the transfers of each pair of ranks run one after the other, in
    the order in which a rank begins them, and a transfer takes place when both have come to it.
    """
    places = [0] * shape.pp
    queues: defaultdict[tuple[int, int], deque[Pass]] = defaultdict(deque)  # of (rank, other): begun, not done
    here: set[Pass] = set()
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if places[rank] == len(program):
                continue
            each = program[places[rank]]
            if isinstance(each, Receive):
                queues[rank, each.made_by.chunk % shape.pp].append(each.made_by)
            else:
                needed = maker(each, shape)
                if needed is not None and needed not in here:
                    continue
                to = receiver(each, shape)
                if to is not None:
                    queues[rank, to.chunk % shape.pp].append(each)
            places[rank] += 1
            moved = True
        for (rank, other), own in queues.items():
            theirs = queues.get((other, rank))
            while own and theirs and own[0] == theirs[0]:
                here.add(own.popleft())
                theirs.popleft()
                moved = True
    return places == [len(program) for program in programs]


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES)
def test_no_two_ranks_wait_for_each_other(shape: PipelineShape) -> None:
    assert ends(programs_of(shape), shape)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 2), (4, 4), (4, 16), (8, 32)])
def test_few_tensors_are_received_before_they_are_needed(schedule, pp: int, micro_batches: int) -> None:
    shape = PipelineShape(schedule, pp, 1, micro_batches)
    for program in programs_of(shape):
        waiting = most = 0
        for each in program:
            if isinstance(each, Receive):
                waiting += 1
            elif maker(each, shape) is not None:
                waiting -= 1
            most = max(most, waiting)
        assert most <= 2


def follow(routes, held):
    """[M] lists of rows held before → what each rank has after."""
    after = [np.full(route.received, -1) for route in routes]
    for source, route in enumerate(routes):
        for target, places in enumerate(route.send):
            arriving = routes[target].receive[source]
            assert len(arriving) == len(places)
            after[target][arriving] = held[source][places]
    return [list(rows) for rows in after]


@pytest.mark.parametrize(
    ("ranks", "copies", "parts", "count"),
    [(1, 1, 1, 13), (2, 1, 2, 1), (2, 2, 1, 13), (4, 2, 2, 13), (6, 1, 2, 0), (6, 2, 1, 13)],
)
def test_features_reach_who_merges_them_and_gradients_return_once(ranks, copies, parts, count):
    """Each of some shards is merged by some ranks, those after them merge nothing."""
    rng = np.random.default_rng(count)
    owner = rng.integers(0, ranks, size=count)
    shards = rng.integers(0, parts, size=count)
    reads = [*np.repeat(np.arange(parts), copies), *[-1] * (ranks - copies * parts)]
    exchange = feature_exchange_of(owner, shards, reads)

    made = [np.flatnonzero(owner == rank) for rank in range(ranks)]
    merged = follow([exchange.features(rank) for rank in range(ranks)], made)
    for rank, rows in enumerate(merged):
        assert rows == list(np.flatnonzero(shards == reads[rank]))

    routes = [exchange.gradients(rank) for rank in range(ranks)]
    assert follow(routes, [np.array(rows, dtype=int) for rows in merged]) == [list(rows) for rows in made]
    assert sum(len(places) for route in routes for places in route.send) == count


def test_ranks_that_merge_the_same_rows_share_the_sending_of_gradients():
    exchange = feature_exchange_of([0] * 8, np.zeros(8), [0, 0])
    assert [sum(map(len, exchange.gradients(rank).send)) for rank in range(2)] == [4, 4]


@pytest.mark.parametrize(("width", "count"), [(1, 13), (2, 0), (3, 2), (4, 40)])
def test_ranks_of_an_encoder_send_equal_runs_of_its_rows(width, count):
    encoder = np.random.default_rng(count).integers(0, 3, size=count)
    sender = senders(encoder, width=width)
    assert list(sender // width) == list(encoder), "a row is sent by a rank that made it"
    for number in range(3):
        made = np.flatnonzero(encoder == number)
        length = shard_size(len(made), width)
        for rank in range(width):  # what `Encoder.forward` hands out
            run = made[rank * length :][:length]
            assert list(np.flatnonzero(sender == number * width + rank)) == list(run)


def cache_in(folder: Path, *, size: int = 2**30, encoder: bytes = b"weights", writers: int = 1) -> FeatureCache:
    return FeatureCache(folder, size=size, encoder=encoder, writers=writers)


def files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.safetensors"))


def test_gives_back_what_it_got(tmp_path):
    features = torch.randn(5, 2, 8).bfloat16()
    cache_in(tmp_path).put("ab12", features)
    found = cache_in(tmp_path).get("ab12")
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, features)


def test_key_knows_pixels_layout_and_encoder(tmp_path):
    patches = torch.randn(4, 12)
    changed = patches.clone()
    changed[3, 11] += 1e-6
    keys = {
        cache_in(tmp_path).key(patches, ((2, 2),)),
        cache_in(tmp_path).key(changed, ((2, 2),)),
        cache_in(tmp_path).key(patches, ((1, 4),)),
        cache_in(tmp_path, encoder=b"others").key(patches, ((2, 2),)),
    }
    assert len(keys) == 4
    assert cache_in(tmp_path).key(patches.clone(), ((2, 2),)) in keys


def test_encoder_hash_knows_every_weight_and_the_configuration():
    weights = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    changed = {**weights, "b": torch.tensor([[0.0, 0.0], [0.0, 1e-7]])}
    hashes = [
        encoder_hash(weights.items(), {"layers": 2}),
        encoder_hash(changed.items(), {"layers": 2}),
        encoder_hash(weights.items(), {"layers": 3}),
    ]
    assert len(set(hashes)) == 3
    assert hashes[0] == encoder_hash({name: value.clone() for name, value in weights.items()}.items(), {"layers": 2})


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_file_is_missed_and_deleted(tmp_path, damage):
    cache = cache_in(tmp_path)
    cache.put("ab12", torch.ones(4, 1, 8))
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes({"flip": bytes(data), "cut": bytes(data[:-7]), "empty": b""}[damage])
    assert cache.get("ab12") is None
    assert files(tmp_path) == []


@pytest.mark.parametrize("writers", [1, 3])
def test_stays_within_its_size_and_keeps_what_was_used_last(tmp_path, writers):
    caches = [cache_in(tmp_path, size=10_000, writers=writers) for _ in range(writers)]
    for number in range(20):
        cache = caches[number % writers]
        cache.put(f"{number:04}", torch.zeros(1, 1, 256))  # a little over 1 KiB
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 10_000
        assert len(files(tmp_path)) >= min(number + 1, 7), "none is evicted before the limit"
        for age, path in enumerate(sorted(files(tmp_path), key=lambda path: path.name, reverse=True)):
            os.utime(path, (1e9 - age, 1e9 - age))
        cache.get("0000")
    assert {"0000", "0019"} <= {path.stem for path in files(tmp_path)}


def test_an_unwritable_folder_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--vision-cache"):
        cache_in(tmp_path / "file" / "below")


def use(folder: str, seed: int) -> int:
    """Write and read the same names as others do, in a cache too small for all; returns wrong answers."""
    cache = cache_in(Path(folder), size=20_000)
    wrong = 0
    for step in range(300):
        number = (step * 7 + seed) % 30
        found = cache.get(f"{number:04}")
        wrong += found is not None and not torch.equal(found, torch.full((1, 1, 256), float(number)))
        if found is None:
            cache.put(f"{number:04}", torch.full((1, 1, 256), float(number)))
    return wrong


def test_processes_share_a_folder(tmp_path):
    with mp.get_context("fork").Pool(2) as pool:
        assert pool.starmap(use, [(str(tmp_path), seed) for seed in range(2)]) == [0, 0]
    assert not list(tmp_path.rglob(".*.safetensors.*"))


STEP = 8


class Noted(LateCopies):
    """Counts bytes that live on the device, copies of fp32, bf16 and integers alike."""

    @property
    def bytes_here(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.here)

    def to_device(self, hosts):
        self.fetched = getattr(self, "fetched", 0) + sum(host.numel() * host.element_size() for host in hosts)
        return super().to_device(hosts)


def size(one: MicroBatch) -> int:
    return sum(value.numel() * value.element_size() for value in one.host_tensors().values())


@pytest.mark.parametrize("chunks", [1, 2])
def test_one_is_used_and_one_is_on_its_way(chunks: int) -> None:
    """Chunks take turns of two, as interleaved on two pipeline ranks; nothing of the plain schedule's is kept."""
    batches = [micro_batch(number) for number in range(STEP)]
    transfers = Noted()
    iterators = on_device(batches, transfers, chunks=chunks)
    found = []
    gc.disable()
    for turn in range(0, STEP, 2):
        for chunk in iterators:
            for number in (turn, turn + 1):
                taken = next(chunk)
                for name, value in taken.host_tensors().items():
                    assert value.equal(batches[number].host_tensors()[name]), "before it has arrived it is not"
                found.append(number)
                assert taken.text.cu_seqlens is batches[number].text.cu_seqlens
                assert taken.features.values is batches[number].features.values, "the leaf that gradients are read from"
                del taken, value
    gc.enable()
    assert len(found) == STEP * chunks
    assert transfers.fetched == STEP * size(batches[0]), "each is copied once, however many chunks take it"
    assert transfers.peak <= (2 if chunks == 1 else 3) * size(batches[0])
    assert transfers.bytes_here == 0


def test_the_next_one_begins_when_one_is_handed_out() -> None:
    transfers = Noted()
    calls = []
    batches = [micro_batch(0), micro_batch(1), micro_batch(2)]
    (taking,) = on_device(batches, transfers, chunks=1, meanwhile=lambda: calls.append(len(transfers.events)))
    assert transfers.events == []
    next(taking)
    assert transfers.events == ["fetch", "arrived", "fetch"]
    next(taking)
    assert transfers.events == ["fetch", "arrived", "fetch", "arrived", "fetch"]
    next(taking)
    assert transfers.events == ["fetch", "arrived", "fetch", "arrived", "fetch", "arrived"]
    assert calls == [0, 3, 5], "what runs meanwhile is queued before a chunk gets its micro-batch"


def test_tensors_travel_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, devices = [], []

    class Here:
        def __init__(self, device: torch.device) -> None:
            devices.append(device)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    empty = torch.empty

    def allocate(*args, pin_memory: bool = False, **kwargs):
        made = empty(*args, **kwargs)
        if pin_memory:
            pinned.append(made)
        return made

    monkeypatch.setattr(torch.cuda, "device", Here)
    monkeypatch.setattr(torch, "empty", allocate)
    plain = micro_batch(1)
    staged = loader.pinned(plain, torch.device("cuda", 3))
    assert devices == [torch.device("cuda", 3)], "not the first device, where a context would be opened"
    travels = staged.host_tensors()
    assert {id(value) for value in pinned} == {id(value) for value in travels.values()}
    assert len(pinned) == len(travels) == 8
    assert staged.images.patches.equal(plain.images.patches)
    assert staged.text.positions.shape == (1, TOKENS)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    assert loader.pinned(staged, torch.device("cuda", 3)).text.tokens is staged.text.tokens, "workers' are already"
    assert loader.pinned(plain, torch.device("cpu")).text.tokens is plain.text.tokens


MODEL = resolved(SMALL).model  # four patches make a feature
LENGTH = 24


@pytest.mark.parametrize("grids", [(), ((4, 4),), ((4, 6), (2, 2), (6, 4), (2, 4), (4, 4))])
@pytest.mark.parametrize("split", [RowSplit(2), RowSplit(4), RowSplit(2, 2), RowSplit(1, 3)], ids=str)
def test_each_image_is_encoded_once_and_its_features_reach_its_tokens(split, grids):
    sizes = ImageSizes(grids)
    features = sum(sizes.image_tokens(MODEL.projector))
    numbers = torch.arange(2 * LENGTH).view(2, LENGTH)
    positions = torch.randperm(2 * LENGTH, generator=torch.Generator().manual_seed(1))[:features].sort().values
    text = TextBatch(numbers, numbers, numbers.float(), numbers, feature_positions=positions)
    whole = MicroBatch(text, sizes)
    parts = [own_part(whole, split, rank=rank, deals=MODEL) for rank in range(split.ranks)]
    dealt = [part.context.images for part in parts if part.context is not None and part.context.images is not None]
    assert len(dealt) == split.ranks

    assert sorted(torch.cat([each.patch_rows for each in dealt]).tolist()) == list(range(sizes.num_patches))
    assert sum(part.image_sizes.num_images for part in parts) == len(grids)
    features = [sum(part.image_sizes.image_tokens(MODEL.projector)) for part in parts]
    assert [each.num_features for each in dealt] == features
    # The indices of the features that each rank encodes: those of its images, in order.
    patch_of_feature = torch.arange(sizes.num_patches).view(-1, 4)[:, 0]
    made = [patch_of_feature[torch.isin(patch_of_feature, each.patch_rows)] // 4 for each in dealt]
    sent = [mine[each.sent].split(each.sent_sizes) for mine, each in zip(made, dealt, strict=True)]
    for rank, (part, each) in enumerate(zip(parts, dealt, strict=True)):
        assert each.received_sizes == tuple(len(messages[rank]) for messages in sent)
        merged = torch.cat([messages[rank] for messages in sent])[each.received]
        assert torch.equal(positions[merged], part.text.labels.flatten()[part.text.feature_positions])


@pytest.mark.parametrize("frames", [(), (9,), (9, 4, 17, 4)], ids=str)
@pytest.mark.parametrize("split", [RowSplit(2), RowSplit(4), RowSplit(2, 2)], ids=str)
def test_each_sound_is_encoded_once_and_its_features_reach_its_tokens(split, frames):
    counts = [features_of(each, MODEL.audio) for each in frames]
    numbers = torch.arange(2 * LENGTH).view(2, LENGTH)
    positions = torch.randperm(2 * LENGTH, generator=torch.Generator().manual_seed(1))[: sum(counts)].sort().values
    text = TextBatch(numbers, numbers, numbers.float(), numbers, feature_positions=positions[:0])
    mels = torch.arange(sum(frames)).float()[:, None]
    whole = MicroBatch(text, ImageSizes(), sounds=SoundBatch(frames, mels, positions, torch.arange(sum(counts))))
    parts = [own_part(whole, split, rank=rank, deals=MODEL) for rank in range(split.ranks)]
    assert sorted(torch.cat([part.sounds.mels[:, 0] for part in parts]).tolist()) == list(range(sum(frames)))
    assert [sum(part.sounds.frames) for part in parts] == [len(part.sounds.mels) for part in parts]
    first = torch.tensor(np.repeat(np.cumsum([0, *frames])[:-1], counts))  # mel frame of each feature's sound
    made = [torch.nonzero(torch.isin(first, part.sounds.mels[:, 0].long()))[:, 0] for part in parts]
    dealt = [part.sounds.dealt for part in parts]
    sent = [mine[each.sent].split(each.sent_sizes) for mine, each in zip(made, dealt, strict=True)]
    for rank, part in enumerate(parts):
        merged = torch.cat([messages[rank] for messages in sent])[part.sounds.rows]
        assert torch.equal(positions[merged], part.text.labels.flatten()[part.sounds.positions])


def test_a_colocated_encoder_keeps_its_images() -> None:
    numbers = torch.arange(8).view(1, 8)
    text = TextBatch(numbers, numbers, numbers.float(), numbers, feature_positions=torch.arange(4))
    part = own_part(MicroBatch(text, ImageSizes(((4, 4),))), RowSplit(2), rank=1, deals=None)
    assert part.context.images is None
    assert part.image_sizes.num_images == 1
