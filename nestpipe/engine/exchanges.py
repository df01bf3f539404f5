"""The process groups of the engine: one per lane that runs collectives, so ranks issue them in one order."""

from __future__ import annotations

from dataclasses import dataclass

from nestpipe.embedding.replica_groups import Replicas, sharding_groups
from nestpipe.ranks.collectives import Exchange


@dataclass(frozen=True)
class Exchanges:
    """``keys`` and ``all2all`` join the ranks that share one copy of the tables, ``allreduce`` joins all.

    ``replicas``: what keeps several copies alike; None for one copy.
    """

    keys: Exchange
    all2all: Exchange
    allreduce: Exchange
    replicas: Replicas | None = None

    @property
    def copies(self) -> int:
        """Groups of ranks that hold a whole copy of the tables each."""
        return self.replicas.groups if self.replicas else 1

    def close(self) -> None:
        """Collective."""
        of_replicas = self.replicas.exchanges.values() if self.replicas else ()
        for exchange in (self.keys, self.all2all, self.allreduce, *of_replicas):
            exchange.close()


def open_exchanges(copies: int) -> Exchanges:
    """Process groups for ``copies`` replicas of the tables. Collective.

    Raises ValueError for ranks that cannot be split so.
    """
    sharding = sharding_groups(copies)
    keys = Exchange(sharding)
    all2all = Exchange(sharding)
    allreduce = Exchange()
    return Exchanges(keys, all2all, allreduce, Replicas(copies) if sharding else None)
