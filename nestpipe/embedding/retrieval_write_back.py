"""Embedding rows on the move between the host table and a buffer.

Retrieval (stage R) is ``gather``: rows of the table into a buffer. Write-back (W) is ``scatter``: a buffer's rows
into the table.
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

    def scatter(self, index: Tensor, rows: Rows) -> None:
        """Write-back: ``self[index[i]] = rows[i]``, weight and state; indices are distinct."""
        self.weight.index_copy_(0, index, rows.weight)
        if self.state.shape[1]:
            self.state.index_copy_(0, index, rows.state)

    def equals(self, table: Rows, index: Tensor) -> bool:
        """Whether these are ``table``'s rows ``index``, bit for bit."""
        same = torch.equal(self.weight, table.weight.index_select(0, index))
        return same and torch.equal(self.state, table.state.index_select(0, index))

    def first(self, count: int) -> Rows:
        """The leading ``count`` rows, without a copy."""
        return Rows(self.weight[:count], self.state[:count])


def empty_rows(count: int, dim: int, state_width: int, memory: Memory = HOST) -> Rows:
    """Room for ``count`` rows, values not set."""
    return Rows(memory.empty(count, dim), memory.empty(count, state_width))
