"""Grouped products by Transformer Engine, for experts of layers that run in FP8.

Its module has a parameter for each expert. Here those of a rank are one parameter, as with torch's products, so that
checkpoints, initial weights, data parallelism and adapters know no difference, and the module gets views of it. Written
against Transformer Engine 2.11, whose kernels take experts without rows, and rows in multiples of 16.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor

from megavlm.model.experts import Product, Rows


@cache
def grouped_linear(base: type) -> type:
    """Return a class of products from `transformer_engine.pytorch.GroupedLinear`, or what stands for it."""

    class GroupedProduct(base):  # type: ignore[misc, unused-ignore]
        def __init__(self, experts: int, rows: int, columns: int) -> None:
            super().__init__(experts, columns, rows, bias=False, init_method=lambda weight: None)
            for name in self._views():
                delattr(self, name)
            # megatron-core sets it before a step's first pass: FP8 weights are kept through the step.
            self.is_first_microbatch = True

        def _views(self) -> list[str]:
            return [f"weight{number}" for number in range(self.num_gemms)]

        def forward(self, x: Tensor, weight: Tensor, rows: Rows) -> Tensor:
            self.__dict__.update(zip(self._views(), weight.unbind(), strict=True))
            output: Tensor = super().forward(x, rows.counts.tolist(), is_first_microbatch=self.is_first_microbatch)
            for name in self._views():  # and with them the graph of this pass
                del self.__dict__[name]
            self.is_first_microbatch = False
            return output

    return GroupedProduct


def make_product(experts: int, rows: int, columns: int) -> Product:
    """Return the product with weights [experts, rows, columns]."""
    from transformer_engine.pytorch import GroupedLinear

    product: Product = grouped_linear(GroupedLinear)(experts, rows, columns)
    return product
