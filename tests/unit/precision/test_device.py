"""What a device makes of FP8's options, in one line where it cannot."""

from __future__ import annotations

import pytest

from megavlm.command_line.parsing import parse
from megavlm.errors import UserError
from megavlm.precision.device import check_device, check_te_fp8

FP8 = "--precision bf16 --fp8 hybrid"


def test_torch_layers_keep_no_weights_in_fp8() -> None:
    check_device(parse(FP8.split()))
    with pytest.raises(UserError, match=r"^--fp8-param-gather needs Transformer Engine: .* leave it out$"):
        check_device(parse([*FP8.split(), "--fp8-param-gather"]))


@pytest.mark.parametrize("sharding", ["optimizer_gradients", "full"])
def test_what_is_known_to_work_with_sharded_weights(sharding: str) -> None:
    for recipe in ("tensorwise", "delayed", "mxfp8"):
        check_te_fp8(parse(f"{FP8} --fp8-recipe {recipe} --data-parallel-sharding {sharding}".split()))
    check_te_fp8(parse(f"{FP8} --fp8-recipe blockwise".split()))
    with pytest.raises(UserError, match=f"--data-parallel-sharding {sharding}: use --fp8-recipe tensorwise, or"):
        check_te_fp8(parse(f"{FP8} --fp8-recipe blockwise --data-parallel-sharding {sharding}".split()))
