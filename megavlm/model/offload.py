"""Offloading of saved activations to host memory until their backward pass (`--offload activations`).

Copies overlap with computation, one layer behind the forward pass and one layer ahead of the backward pass:

    forward    layer 1 │ layer 2          │ layer 3          │ …      at most two layers' tensors are on the device:
    copies             │ tensors of 1 out │ tensors of 2 out │ …      those of 1 are freed when layer 3 begins
    backward   layer 3 │ layer 2          │ layer 1          │        the same: when a layer begins, its tensors have
    copies     2 back  │ 1 back           │                           arrived, and the next layer's copies begin

Each pass (a micro-batch through a chunk) records the order of its own layers, so passes may follow in any order (1F1B,
interleaved). A layer whose backward pass comes before its tensors were freed uses them where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from megavlm.backend.host_copies import HostCopies
from megavlm.parallel.shards import local_part

# A tensor with fewer elements stays on the device: its transfer would cost a latency and save next to nothing.
_SMALLEST = 1024
_PLAIN = (Tensor, FakeTensor)  # types whose tensors have a storage of their own; fake ones stand for a device's


class Offload:
    """Offloading of the tensors that the layers of a rank's chunks save for their backward pass.

    A pass calls `begin_pass`, runs each layer within `layer`, and gives its output to `expect_backward`.
    """

    def __init__(self, copies: HostCopies, *, smallest: int = _SMALLEST) -> None:
        self._copies = copies
        self._smallest = smallest
        self._last: _Layer | None = None  # the last layer of this pass
        self._leaving: _Layer | None = None  # of any pass: the layer that is being copied and is not freed yet

    def begin_pass(self) -> None:
        """Begin a forward pass of a micro-batch through a chunk."""
        self._last = None

    @contextmanager
    def layer(self, module: nn.Module, *stays: Any) -> Iterator[None]:
        """Offload the tensors that autograd saves within this context, the forward pass of a layer.

        The layer's parameters, the tensors in `stays` (which other layers use as well) and small tensors stay.
        """
        layer = _Layer(self._copies, module, stays, before=self._last, smallest=self._smallest)
        with saved_tensors_hooks(layer.pack, _unpacked):
            yield
        if not layer.send():
            return  # nothing was saved: the layer is frozen
        if self._leaving is not None:
            self._leaving.let_go()
        self._last = self._leaving = layer

    def expect_backward(self, output: Tensor) -> None:
        """Prefetch the last layer's tensors as soon as `output` gets a gradient, at the start of the backward pass."""
        if (last := self._last) is not None and output.requires_grad:
            output.register_hook(lambda gradient: last.fetch())


class _Stored:
    """Bytes that a layer saved, on the device, on the host, or both, freed with autograd's last view of them."""

    def __init__(self, copies: HostCopies, here: Tensor) -> None:
        self.copies = copies
        self.here: Tensor | None = here
        self.host: Tensor | None = None
        self.arriving: Any = None  # ticket of the copy back

    def __del__(self) -> None:
        if self.arriving is not None:  # the copy back was never used: it must end before its memory is used again
            self.copies.wait(self.arriving)


@dataclass(frozen=True)
class _Saved:
    """One saved tensor, as a view of stored bytes."""

    layer: _Layer
    stored: _Stored
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Layer:
    """The tensors that one layer saves in one pass. Autograd owns it, so that freed tensors are freed here, too."""

    def __init__(
        self, copies: HostCopies, module: nn.Module, stays: tuple[Any, ...], *, before: _Layer | None, smallest: int
    ) -> None:
        self._copies = copies
        self._module: nn.Module | None = module
        self._stays = {leaf.untyped_storage()._cdata for leaf in tree_leaves(stays) if isinstance(leaf, Tensor)}
        self._before = before
        self._smallest = smallest
        self._known: dict[Any, tuple[_Stored, torch.UntypedStorage]] = {}  # holds storages: keys are their addresses
        self._all: list[weakref.ref[_Stored]] = []
        self._sent: Any = None
        self._here = True

    def pack(self, tensor: Tensor) -> Any:
        """Return autograd's substitute for a tensor: a `_Saved`, or the tensor itself if it is not offloaded."""
        if isinstance(tensor, nn.Parameter):
            return tensor
        if self._module is not None:  # not earlier: sharded parameters are whole only while the layer runs
            self._stays |= {local_part(param).untyped_storage()._cdata for param in self._module.parameters()}
            self._module = None
        if not self._goes(tensor):
            return tensor.detach()
        with torch.no_grad():
            return self._saved(tensor)

    def _goes(self, tensor: Tensor) -> bool:
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        here = tensor.device.type == self._copies.device.type
        return (
            plain and here and tensor.numel() >= self._smallest and tensor.untyped_storage()._cdata not in self._stays
        )

    def _saved(self, tensor: Tensor) -> _Saved:
        """Return a tensor as a view of stored bytes: its whole storage, or the tensor alone if it is under half of it.

        Tensors of one storage share the copy of it.
        """
        storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        whole = (storage._cdata,)
        if whole in self._known or 2 * tensor.numel() * tensor.element_size() >= storage.nbytes():
            stored = self._stored(whole, storage, lambda: _bytes_of(storage, tensor.device))
            return _Saved(self, stored, tensor.dtype, shape, stride, offset)
        part = tensor.contiguous()
        stored = self._stored((*whole, offset, shape, stride), storage, lambda: part.flatten().view(torch.uint8))
        return _Saved(self, stored, tensor.dtype, shape, tuple(part.stride()), 0)

    def _stored(self, key: Any, storage: torch.UntypedStorage, make: Callable[[], Tensor]) -> _Stored:
        if key not in self._known:
            self._known[key] = _Stored(self._copies, make()), storage
            self._all.append(weakref.ref(self._known[key][0]))
        return self._known[key][0]

    def _alive(self) -> list[_Stored]:
        return [stored for reference in self._all if (stored := reference()) is not None]

    def send(self) -> bool:
        """Begin to copy the saved tensors to the host after the forward pass; return whether there are any."""
        self._known.clear()
        alive = self._alive()
        if not alive:
            return False
        hosts, self._sent = self._copies.to_host([stored.here for stored in alive if stored.here is not None])
        for stored, host in zip(alive, hosts, strict=True):
            stored.host = host
        return True

    def let_go(self) -> None:
        """Free the device memory once the copies to the host are done."""
        self._copies.wait(self._sent)
        self._here = False
        for stored in self._alive():
            stored.here = None

    def fetch(self) -> None:
        """Begin to copy the saved tensors back, unless they are on the device or on their way."""
        if self._here:
            return
        self._here = True
        alive = self._alive()
        tensors, ticket = self._copies.to_device([stored.host for stored in alive if stored.host is not None])
        for stored, tensor in zip(alive, tensors, strict=True):
            stored.here, stored.arriving = tensor, ticket

    def arrive(self, stored: _Stored) -> Tensor:
        """Return stored bytes on the device for this layer's backward pass, and prefetch the layer before it."""
        self.fetch()
        if stored.arriving is not None:
            self._copies.wait(stored.arriving)
            stored.arriving = stored.host = None
        if self._before is not None:
            self._before.fetch()
            self._before = None
        assert stored.here is not None
        return stored.here


def _unpacked(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    here = packed.layer.arrive(packed.stored)
    numbers = here[: here.numel() // packed.dtype.itemsize * packed.dtype.itemsize].view(packed.dtype)
    return numbers.as_strided(packed.shape, packed.stride, numbers.storage_offset() + packed.offset)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
