"""One rank's shard of the embedding tables, in host memory.

Tables are sharded row-wise in equal blocks, as TorchRec does it: the rows of rank r of n begin at row
r * ceil(rows / n). All tables of a model are in one tensor, one after the other, so a single local row
number names both table and row. Whenever a *row* is moved, it is its weight and its optimizer state.
Retrieval gathers rows from the shard, and write-back scatters them into it (``retrieval_write_back.Rows``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.data.tables import TableConfig
from nestpipe.embedding.memory import HOST
from nestpipe.embedding.retrieval_write_back import Rows

#: Rows that share a random generator. Initial values are drawn block by block, so they do not depend on the sharding.
_INITIAL_BLOCK = 4096


def initial_rows(seed: int, table: TableConfig, start: int, stop: int) -> Tensor:
    """Initial values of rows start..stop-1, float32 [stop - start, dim], uniform in (-scale, scale) or by ``fill``.

    A row's values depend only on (seed, table name, row).
    """
    rows = HOST.empty(stop - start, table.dim)
    fill_initial_rows(rows, seed, table, start)
    return rows


def fill_initial_rows(out: Tensor, seed: int, table: TableConfig, start: int) -> None:
    """Write ``initial_rows`` to ``out``, without a second copy of the shard."""
    stop = start + len(out)
    generator = torch.Generator()
    for block in range(start // _INITIAL_BLOCK, -(-stop // _INITIAL_BLOCK)):
        first = block * _INITIAL_BLOCK
        number, values = _mix(seed, table.name, block), HOST.empty(_INITIAL_BLOCK, table.dim)
        if table.fill is None:
            values.uniform_(-table.scale, table.scale, generator=generator.manual_seed(number))
        else:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(number)
                table.fill(values)
        low, high = max(first, start), min(first + _INITIAL_BLOCK, stop)
        out[low - start : high - start] = values[low - first : high - first]


def _mix(seed: int, name: str, block: int) -> int:
    # FNV-1a, since Python's own hash of a string differs between processes.
    value = 0xCBF29CE484222325
    for byte in f"{seed}/{name}/{block}".encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value >> 1


@dataclass(frozen=True)
class ShardLayout:
    """Which rank holds which rows. ``block[t]``: rows of table t per rank. ``base[t]``: its first local row."""

    tables: tuple[TableConfig, ...]
    world_size: int
    block: tuple[int, ...]
    base: tuple[int, ...]
    local_rows: int

    def owned(self, table: int, rank: int) -> tuple[int, int]:
        """(First, last + 1) of the rows of ``table`` that ``rank`` owns. High ranks own no rows of a small table."""
        rows = self.tables[table].rows
        return min(rank * self.block[table], rows), min((rank + 1) * self.block[table], rows)


def shard_layout(tables: Sequence[TableConfig], world_size: int) -> ShardLayout:
    """Equal blocks of every table for each rank.

    Raises ValueError for tables of different dims, since one buffer holds all rows, and for two of the same name.
    """
    names = [t.name for t in tables]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two embedding tables are called '{twice}': give each its own name")
    if len({t.dim for t in tables}) > 1:
        dims = ", ".join(f"{t.name} {t.dim}" for t in tables)
        raise ValueError(f"all embedding tables must share one embedding dimension, got {dims}")
    block = tuple(-(-t.rows // world_size) for t in tables)
    base = tuple(sum(block[:t]) for t in range(len(tables)))
    return ShardLayout(tuple(tables), world_size, block, base, sum(block))


@dataclass(frozen=True)
class HostTable:
    """The shard of all tables that ``rank`` owns: ``rows`` [layout.local_rows], in the order that ``layout`` gives."""

    layout: ShardLayout
    rank: int
    rows: Rows

    def block(self, name: str) -> Rows:
        """This rank's rows of a table, without a copy. At the end of the table they are padded to equal blocks."""
        t = self._number(name)
        first, last = self.layout.base[t], self.layout.base[t] + self.layout.block[t]
        return Rows(self.rows.weight[first:last], self.rows.state[first:last])

    def frozen_among(self, index: Tensor) -> Tensor | None:
        """Positions in ``index``, local row numbers, of rows of frozen tables; None if no table is frozen."""
        blocks = zip(self.layout.tables, self.layout.base, self.layout.block, strict=True)
        frozen = [(index >= first) & (index < first + count) for table, first, count in blocks if table.frozen]
        return torch.stack(frozen).any(0).nonzero().flatten() if frozen else None

    def load(self, name: str, values: Tensor) -> None:
        """Set this rank's weights of a table from the ``values`` of the whole table, float32 [rows, dim]."""
        start, stop = self.layout.owned(self._number(name), self.rank)
        self.block(name).weight[: stop - start] = values[start:stop]

    def _number(self, name: str) -> int:
        return [table.name for table in self.layout.tables].index(name)


def host_table(layout: ShardLayout, rank: int, seed: int, state_width: int) -> HostTable:
    """This rank's shard with its initial values. The optimizer state is zero."""
    dim = layout.tables[0].dim
    rows = Rows(HOST.zeros(layout.local_rows, dim), HOST.zeros(layout.local_rows, state_width))
    for t, table in enumerate(layout.tables):
        start, stop = layout.owned(t, rank)
        fill_initial_rows(rows.weight[layout.base[t] : layout.base[t] + stop - start], seed, table, start)
    return HostTable(layout, rank, rows)


def resharded_rows(shards: Sequence[Rows], layout: ShardLayout, rank: int) -> Rows:
    """The shard of ``rank`` in ``layout``, from all shards of the same tables over a different number of ranks."""
    old = shard_layout(layout.tables, len(shards))
    dim, state_width = shards[0].weight.shape[1], shards[0].state.shape[1]
    result = Rows(HOST.zeros(layout.local_rows, dim), HOST.zeros(layout.local_rows, state_width))
    for t in range(len(layout.tables)):
        start, stop = layout.owned(t, rank)
        for source, shard in enumerate(shards):
            first, last = old.owned(t, source)
            low, high = max(start, first), min(stop, last)
            if low < high:
                to = slice(layout.base[t] + low - start, layout.base[t] + high - start)
                source_rows = slice(old.base[t] + low - first, old.base[t] + high - first)
                result.weight[to] = shard.weight[source_rows]
                result.state[to] = shard.state[source_rows]
    return result
