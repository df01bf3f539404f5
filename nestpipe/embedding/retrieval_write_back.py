"""Moves embedding rows between the host table and a buffer.

Retrieval (stage R) is ``gather``, from the table to a buffer. Write-back (stage W) is ``scatter``, from a buffer to
the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.memory import HOST, Memory


@dataclass
class Rows:
    """Embedding rows with their optimizer state: float32 [n, dim] and float32 [n, state width] (width may be 0)."""

    weight: Tensor
    state: Tensor

    def __len__(self) -> int:
        return len(self.weight)

    def gather(self, index: Tensor, out: Rows) -> None:
        """Retrieval: ``out[i] = self[index[i]]``, weight and state."""
        torch.index_select(self.weight, 0, index, out=out.weight)
        if self.state.shape[1]:
            torch.index_select(self.state, 0, index, out=out.state)

    def taken(self, index: Tensor) -> Rows:
        """Copies of the rows ``index``."""
        return Rows(self.weight.index_select(0, index), self.state.index_select(0, index))

    def scatter(self, index: Tensor, rows: Rows) -> None:
        """Write-back: ``self[index[i]] = rows[i]``, weight and state. The indices must be distinct."""
        self.weight.index_copy_(0, index, rows.weight)
        if self.state.shape[1]:
            self.state.index_copy_(0, index, rows.state)

    def equals(self, table: Rows, index: Tensor) -> bool:
        """Whether these rows equal rows ``index`` of ``table``, bit for bit."""
        same = torch.equal(self.weight, table.weight.index_select(0, index))
        return same and torch.equal(self.state, table.state.index_select(0, index))

    def first(self, count: int) -> Rows:
        """The first ``count`` rows, without a copy."""
        return Rows(self.weight[:count], self.state[:count])


def empty_rows(count: int, dim: int, state_width: int, memory: Memory = HOST) -> Rows:
    """``count`` rows with undefined values."""
    return Rows(memory.empty(count, dim), memory.empty(count, state_width))
