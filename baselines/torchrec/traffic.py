"""How many keys a TorchRec step moved and how many there were; counted after the step, in time linear in the keys."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from baselines.torchrec.batches import KeyedBatch
from nestpipe.data.tables import TableConfig


class Traffic:
    """Counts distinct keys of a step: this rank's own, and those that other ranks asked it for."""

    def __init__(
        self,
        collection: ShardedEmbeddingCollection,
        tables: Mapping[str, TableConfig],
        group: dist.ProcessGroup,
    ) -> None:
        self._tables = tables
        self._rank = dist.get_rank(group)
        self._world = dist.get_world_size(group)
        self._block = {name: -(-table.rows // self._world) for name, table in tables.items()}
        # A scatter of positions leaves one winner per code here, which finds distinct codes without a sort.
        self._winner = torch.empty(max(table.rows for table in tables.values()), dtype=torch.int32)
        self._samples_per_rank: list[int] = []
        for lookup in collection._lookups:
            lookup.register_forward_pre_hook(self._keep_received)
        for output in collection._output_dists:
            output.register_forward_pre_hook(self._keep_sizes)

    def _keep_received(self, module: nn.Module, inputs: tuple[KeyedJaggedTensor]) -> None:
        self._received = inputs[0]

    def _keep_sizes(self, module: nn.Module, inputs: Any) -> None:
        self._samples_per_rank = inputs[1].batch_size_per_rank

    def of(self, batch: KeyedBatch) -> tuple[int, float]:
        """Minimum bytes of embeddings and gradients that this rank sends to others, and the duplication factor.

        Minimum: each distinct key of a rank's batch travels once, as float32 rows.
        Factor: keys of the rank's batch / distinct ones, 1.0 if there are none.
        """
        bytes_, keys, distinct = 0, 0, 0
        asked = self._asked_by_others()
        for table in self._tables.values():
            own = torch.cat([batch.sparse[feature].values() for feature in table.features])
            once = self._first_of_each(own)
            low = self._rank * self._block[table.name]
            mine = (own >= low) & (own < low + self._block[table.name])
            count, local = int(once.sum()), int((once & mine).sum())
            bytes_ += (count - local + asked[table.name]) * table.dim * 4
            keys, distinct = keys + len(own), distinct + count
        return bytes_, keys / distinct if distinct else 1.0

    def _asked_by_others(self) -> dict[str, int]:
        """By table, the distinct keys that each other rank asked this one for, summed over those ranks."""
        asked = dict.fromkeys(self._tables, 0)
        if self._world == 1:
            return asked
        # The keys are ordered by feature and, within a feature, by the samples of rank 0, rank 1, ...
        first_sample = [0, *accumulate(self._samples_per_rank)]
        samples = first_sample[-1]
        names = self._received.keys()
        bounds = [f * samples + first for f in range(len(names)) for first in first_sample]
        begin = self._received.offsets()[torch.tensor(bounds)].tolist()
        values = self._received.values()
        for table in self._tables.values():
            for source in range(self._world):
                if source != self._rank:
                    at = [names.index(feature) * (self._world + 1) + source for feature in table.features]
                    keys = torch.cat([values[begin[i] : begin[i + 1]] for i in at])
                    asked[table.name] += int(self._first_of_each(keys).sum())
        return asked

    def _first_of_each(self, codes: Tensor) -> Tensor:
        """Mask that keeps one occurrence of each distinct code."""
        positions = torch.arange(len(codes), dtype=torch.int32)
        self._winner.scatter_(0, codes, positions)
        return self._winner.gather(0, codes) == positions
