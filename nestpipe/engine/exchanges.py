"""The process groups of the engine: one for each lane that runs collectives, so all ranks issue them in one order."""

from __future__ import annotations

from dataclasses import dataclass

from nestpipe.embedding.replica_groups import Replicas, sharding_groups
from nestpipe.ranks.collectives import Exchange


@dataclass(frozen=True)
class Exchanges:
    """``keys`` and ``all2all`` join the ranks that share one copy of the tables, and ``allreduce`` joins all ranks.

    ``replicas``: keeps several copies equal; None for one copy.
    """

    keys: Exchange
    all2all: Exchange
    allreduce: Exchange
    replicas: Replicas | None = None

    @property
    def copies(self) -> int:
        """The number of copies of the tables; each is held by a group of ranks."""
        return self.replicas.groups if self.replicas else 1

    def close(self) -> None:
        """Collective."""
        of_replicas = self.replicas.exchanges.values() if self.replicas else ()
        for exchange in (self.keys, self.all2all, self.allreduce, *of_replicas):
            exchange.close()


def open_exchanges(copies: int) -> Exchanges:
    """Process groups for ``copies`` replicas of the tables. Collective.

    Raises ValueError if the ranks cannot be split into that many groups of equal size.
    """
    sharding = sharding_groups(copies)
    keys = Exchange(sharding)
    all2all = Exchange(sharding)
    allreduce = Exchange()
    return Exchanges(keys, all2all, allreduce, Replicas(copies) if sharding else None)
