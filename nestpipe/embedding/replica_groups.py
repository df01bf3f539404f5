"""Tables replicated over groups of ranks. Group g of M has the ranks r with r mod M = g and a copy of all tables.

All2Alls stay inside a group. What a batch's update needs from other groups is exchanged among the ranks that hold
the same shard in each group (stage D). So every replica makes the same update, and all stay equal bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.embedding.key_routing import RoutingPlan, shared_positions
from nestpipe.embedding.memory import HOST
from nestpipe.ranks.collectives import Exchange


def check_groups(ranks: int, groups: int) -> None:
    """Raises ValueError if the ranks cannot be split into ``groups`` groups of equal size."""
    if groups < 1 or ranks % groups:
        raise ValueError(f"{ranks} ranks cannot be split into {groups} replica groups of equal size")


def sharding_groups(groups: int) -> list[list[int]] | None:
    """The ranks of each group; None if one group has them all. Raises ValueError if they cannot be split equally."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    check_groups(ranks, groups)
    return [list(range(g, ranks, groups)) for g in range(groups)] if groups > 1 else None


def replica_groups(groups: int) -> list[list[int]]:
    """For each shard the ranks that hold it, one per group, in the order of the groups."""
    ranks = dist.get_world_size()
    return [list(range(first, first + groups)) for first in range(0, ranks, groups)]


class Replicas:
    """Exchanges with the ranks that hold this rank's shard in the other groups.

    There is one process group for key routing (K) and one for D. Construction is collective.
    """

    def __init__(self, groups: int):
        self.groups = groups
        self.exchanges = {name: Exchange(replica_groups(groups)) for name in ("replica keys", "replicas")}

    def agree(self, facts: Tensor) -> Tensor:
        """int64 [groups, n]: the ``facts``, int64 [n], of all groups. Part of K."""
        return self.exchanges["replica keys"].all_gather(facts)

    def widened(self, plan: RoutingPlan, previous: RoutingPlan | None) -> RoutingPlan:
        """``plan`` with the rows that any group touches, since their replicas here must be updated too. Part of K."""
        own = [plan.rows[micro.send_index.unique()] for micro in plan.micro]
        everywhere = [rows.unique() for rows in self._gathered(own)]
        rows = torch.cat(everywhere).unique()
        place = torch.searchsorted(rows, plan.rows)
        micro = tuple(
            replace(
                m,
                send_index=place[m.send_index],
                everywhere=torch.searchsorted(rows, union),
                arrive_index=torch.searchsorted(union, plan.rows[m.send_index]),
            )
            for m, union in zip(plan.micro, everywhere, strict=True)
        )
        shared, shared_before = (rows[:0], rows[:0]) if previous is None else shared_positions(rows, previous.rows)
        return replace(plan, micro=micro, rows=rows, shared=shared, shared_before=shared_before)

    def _gathered(self, pieces: list[Tensor]) -> list[Tensor]:
        """The rows of all groups, for each micro-batch."""
        exchange, groups = self.exchanges["replica keys"], self.groups
        counts = exchange.all_gather(torch.tensor([len(p) for p in pieces]))  # [groups, micro-batches]
        mine = torch.cat(pieces)
        received = HOST.empty(int(counts.sum()), dtype=torch.int64)
        exchange.all_to_all(received, mine.repeat(groups), counts.sum(1).tolist(), [len(mine)] * groups)
        parts = received.split(counts.flatten().tolist())
        return [torch.cat(parts[m :: len(pieces)]) for m in range(len(pieces))]

    def summed(self, gradient: Tensor) -> Tensor:
        """float32 [n, dim]: the sum over groups, equal bit for bit on all of them."""
        self.exchanges["replicas"].all_reduce(gradient)
        return gradient

    def apart(self, gradient: Tensor) -> Tensor:
        """float32 [groups, n, dim]: the gradient of each group."""
        return self.exchanges["replicas"].all_gather(gradient)

    def sent_rows(self, rows: int, averaged: bool) -> int:
        """Rows that this rank sends for a D of ``rows`` rows: ring AllGather if ``averaged``, else ring AllReduce."""
        others = self.groups - 1
        return others * rows if averaged else 2 * others * rows // self.groups
