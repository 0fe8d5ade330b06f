"""A step's micro-batches on their way to a chunk: one ahead, copied once, gone when all chunks have had it; images
dealt to context-parallel ranks, on paper.
"""

from __future__ import annotations

import gc

import pytest
import torch

from megavlm.arch.dims import RowSplit
from megavlm.data import loader
from megavlm.inputs.batch import ImageSizes, MicroBatch, TextBatch
from megavlm.pipeline.micro_batches import on_device, own_part
from tests.support.flags import resolved
from tests.support.host_copies import LateCopies
from tests.support.micro_batch import TOKENS, micro_batch
from tests.support.training import SMALL

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


def test_a_colocated_encoder_keeps_its_images() -> None:
    numbers = torch.arange(8).view(1, 8)
    text = TextBatch(numbers, numbers, numbers.float(), numbers, feature_positions=torch.arange(4))
    part = own_part(MicroBatch(text, ImageSizes(((4, 4),))), RowSplit(2), rank=1, deals=None)
    assert part.context.images is None
    assert part.image_sizes.num_images == 1
