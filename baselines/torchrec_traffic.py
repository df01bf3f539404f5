"""How many keys a TorchRec step moved and how many there were: counted after the step, linear in the keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from baselines.torchrec_batch import KeyedBatch
from nestpipe.trainer import TableConfig


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
        size = max(self._block.values()) * self._world
        # One winner per code is left here by a scatter of positions: distinct codes without a sort.
        self._winner = torch.empty(size, dtype=torch.int32)
        self._received: list[KeyedJaggedTensor] = []
        self._samples_per_rank: list[int] = []
        for lookup in collection._lookups:
            lookup.register_forward_pre_hook(self._keep_received)
        for output in collection._output_dists:
            output.register_forward_pre_hook(self._keep_sizes)

    def _keep_received(self, module: nn.Module, inputs: tuple[KeyedJaggedTensor]) -> None:
        self._received = [inputs[0]]

    def _keep_sizes(self, module: nn.Module, inputs: Any) -> None:
        self._samples_per_rank = inputs[1].batch_size_per_rank

    def of(self, batch: KeyedBatch) -> tuple[int, float]:
        """Minimum bytes of embeddings and gradients that this rank sends to others, and the duplication factor.

        Minimum: each distinct key of a rank's batch travels once, as float32 rows.
        Factor: keys of the rank's batch / distinct ones, 1.0 where there are none.
        """
        bytes_, keys, distinct = 0, 0, 0
        for table in self._tables.values():
            own = torch.cat([batch.sparse[feature].values() for feature in table.features])
            once = own[self._first_of_each(own)]
            remote = int((once // self._block[table.name] != self._rank).sum())
            asked = self._asked_by_others(table)
            bytes_ += (remote + asked) * table.dim * 4
            keys, distinct = keys + len(own), distinct + len(once)
        return bytes_, keys / distinct if distinct else 1.0

    def _asked_by_others(self, table: TableConfig) -> int:
        if self._world == 1:
            return 0
        (received,) = self._received
        block = self._block[table.name]
        source = torch.repeat_interleave(torch.arange(self._world), torch.tensor(self._samples_per_rank))
        codes = []
        for feature in table.features:
            jagged = received[feature]
            of_key = torch.repeat_interleave(source, jagged.lengths().long())
            codes.append((jagged.values() + block * of_key)[of_key != self._rank])
        return int(self._first_of_each(torch.cat(codes)).sum())

    def _first_of_each(self, codes: Tensor) -> Tensor:
        """Mask that keeps one occurrence of each distinct code."""
        positions = torch.arange(len(codes), dtype=torch.int32)
        self._winner[codes] = positions
        return self._winner[codes] == positions
