"""Embedding rows on the move: retrieval from the host table into a buffer, and write-back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Rows:
    """Embedding rows with their optimizer state: float32 [n, dim] and float32 [n, state width] (width may be 0)."""

    weight: Tensor
    state: Tensor

    def __len__(self) -> int:
        return len(self.weight)

    def gather(self, index: Tensor, out: Rows) -> None:
        """``out[i] = self[index[i]]``."""
        torch.index_select(self.weight, 0, index, out=out.weight)
        if self.state.shape[1]:
            torch.index_select(self.state, 0, index, out=out.state)

    def scatter(self, index: Tensor, rows: Rows) -> None:
        """``self[index[i]] = rows[i]``; indices are distinct."""
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


def empty_rows(count: int, dim: int, state_width: int) -> Rows:
    return Rows(torch.empty(count, dim), torch.empty(count, state_width))
