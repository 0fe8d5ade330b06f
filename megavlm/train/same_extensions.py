"""Check that all ranks have the same extensions: another version on one machine would compute something else."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch.distributed as dist

from megavlm.errors import UserError
from megavlm.rules.extensions import FLAG, fingerprint


def check_same_extensions(names: Sequence[str]) -> None:
    """Raise UserError on all ranks if the source of an extension differs between them. Every rank calls it."""
    if not names:
        return
    found: list[tuple[str, list[str]]] = [("", [])] * dist.get_world_size()
    dist.all_gather_object(found, (platform.node(), [fingerprint(name) for name in names]))
    first, expected = found[0]
    for place, name in enumerate(names):
        if others := sorted({host for host, prints in found if prints[place] != expected[place]}):
            raise UserError(
                f"{FLAG} {name} has other code on {', '.join(others[:8])} than on {first}: install the same there"
            )
