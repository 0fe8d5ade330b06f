"""Collect the embedded texts of the validation data, and score how well queries find their documents among all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.data.types import PADDING, RECORD, SOURCE
from megavlm.metrics.callback import Value
from megavlm.objective.cached import Representations
from megavlm.objective.gather import gathered, gathered_members, longest
from megavlm.objective.retrieval import SCORES, retrieval_sums
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

    def scores(self, names: Sequence[str], device: torch.device) -> dict[str, Value]:
        """Return the mean of each score over all queries of all ranks, and of each data set if there are several.

        A query is compared with the documents of its own data set. Every rank calls it, and gets the same.
        """
        scores = SCORES
        sums = torch.zeros(len(names), len(scores) + 1, dtype=torch.float64, device=device)
        at, groups = self._groups.coords, self._groups
        if self._vectors:
            length = longest(self._records, groups.dp, device)
            vectors = gathered(torch.cat(self._vectors), length, groups.dp)
            members = gathered_members(torch.cat(self._members), length, groups.dp)
            each_rank = max(len(members) // groups.dp.size(), 1)
            for number in range(len(names) if groups.is_first_tp and at.cp == 0 else 0):  # others have the same
                here = members.masked_fill((members[:, SOURCE] != number)[:, None], PADDING)
                own = torch.nonzero(Texts(here).queries // each_rank == groups.dp.rank()).flatten()
                found = retrieval_sums(vectors, here, own)
                sums[number] = torch.tensor([found[name] for name in (*scores, "queries")], device=device)
        dist.all_reduce(sums)
        told = _means("validation", scores, sums.sum(0))
        for name, own_sums in zip(names, sums, strict=True):
            told |= _means(f"validation/{name}", scores, own_sums) if len(names) > 1 else {}
        return told


def _means(name: str, scores: Sequence[str], sums: Tensor) -> dict[str, Value]:
    *totals, queries = sums.tolist()
    return {f"{name}/{score}": total / max(queries, 1.0) for score, total in zip(scores, totals, strict=True)}
