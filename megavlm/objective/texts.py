"""The embedded texts of a global batch: which query each document answers, and which documents are no negatives.

Legend: R texts, H width, Q queries, D documents, P positives, I positives of a query at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megavlm.data.types import ID, NEGATIVE, POSITIVE, QUERY, RECORD, ROLE


@dataclass(frozen=True, eq=False)
class Texts:
    """What is known of the texts of a batch: [R, 4] int64, the columns of `data/types.py`.

    A record's number is its own in the whole batch. A row whose role is none of the three is padding.
    """

    members: Tensor

    @cached_property
    def queries(self) -> Tensor:
        """Return [Q], the rows that are queries."""
        return torch.nonzero(self.members[:, ROLE] == QUERY).flatten()

    @cached_property
    def documents(self) -> Tensor:
        """Return [D], the rows that are documents: positives and negatives of all queries."""
        role = self.members[:, ROLE]
        return torch.nonzero((role == POSITIVE) | (role == NEGATIVE)).flatten()

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return for each positive the index of its query among the queries, and its own among the documents: [P] each.

        Positives are in the order of their rows.
        """
        own = torch.nonzero(self.members[self.documents, ROLE] == POSITIVE).flatten()
        records, order = self.members[self.queries, RECORD].sort()
        return order[torch.searchsorted(records, self.members[self.documents[own], RECORD].contiguous())], own

    @cached_property
    def identities(self) -> Tensor:
        """Return [D], what each document is."""
        return self.members[self.documents, ID]

    @cached_property
    def wanted(self) -> Tensor:
        """Return [Q, I], what the positives of each query are; −1 where a query has fewer than others."""
        query, document = self.pairs
        by_query = query.argsort(stable=True)
        counts = torch.bincount(query, minlength=len(self.queries))
        first = counts.cumsum(0) - counts
        place = torch.arange(len(by_query), device=query.device) - first[query[by_query]]
        table = query.new_full((len(self.queries), int(counts.max()) if len(query) else 0), -1)
        table[query[by_query], place] = self.identities[document[by_query]]
        return table

    def answers(self, queries: Tensor | slice = slice(None), documents: Tensor | slice = slice(None)) -> Tensor:
        """Return [q, d] bool: whether each of these documents answers each of these queries, as one of its positives or
        as a document that is the same as one.
        """
        return same(self.wanted[queries], self.identities[documents])


def same(wanted: Tensor, identities: Tensor) -> Tensor:
    """Return [q, d] bool: whether a document is what one of the positives [q, I] of a query is."""
    found = torch.zeros(len(wanted), len(identities), dtype=torch.bool, device=identities.device)
    for column in wanted.unbind(1):
        found |= column[:, None] == identities
    return found


def renumbered(members: Tensor, rank: int) -> Tensor:
    """Return a data-parallel rank's members with records that no other rank has, given its own numbers."""
    members = members.clone()
    members[:, RECORD] += rank << 32
    return members
