"""Collect the embedded texts of the validation data, and score how well queries find their documents among all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.data.members import RECORD
from megavlm.metrics.callback import Value
from megavlm.objective.cached import Representations
from megavlm.objective.gather import gathered
from megavlm.objective.retrieval import retrieval_sums
from megavlm.objective.texts import Texts
from megavlm.parallel.groups import Groups


class HeldOutTexts:
    """The texts of all validation batches of this rank; only ranks of the last stage have any."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._vectors: list[Tensor] = []
        self._members: list[Tensor] = []
        self._records = 0

    def add(self, found: Representations) -> None:
        """Keep the texts of a batch."""
        members = found.members.clone()
        members[:, RECORD] += self._records
        self._records += len(members)
        self._vectors.append(found.vectors)
        self._members.append(members)

    def scores(self, device: torch.device) -> dict[str, Value]:
        """Return the mean of each score over all queries of all ranks; every rank calls it, and gets the same."""
        names = [*retrieval_sums(torch.empty(0, 1), torch.empty(0, 4, dtype=torch.int64), torch.empty(0).long())]
        sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        at, groups = self._groups.coords, self._groups
        if self._vectors:
            vectors, members = gathered(torch.cat(self._vectors), torch.cat(self._members), groups.dp)
            rows = Texts(members).queries
            own = torch.nonzero(rows // max(len(members) // groups.dp.size(), 1) == groups.dp.rank()).flatten()
            if groups.is_first_tp and at.cp == 0:  # others have the same
                found = retrieval_sums(vectors, members, own)
                sums += torch.tensor([found[name] for name in names], dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        totals = dict(zip(names, sums.tolist(), strict=True))
        queries = totals.pop("queries")
        return {f"validation/{name}": total / max(queries, 1.0) for name, total in totals.items()}
