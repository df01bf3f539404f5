"""The one place that allocates what the engine's stages hand to one another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """Tensors on one device: rings, buffers, received rows, accumulators and flat gradients come from here."""

    device: str = "cpu"

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor whose values are whatever was in its memory."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


#: Where tables, keys and routing plans are, whatever device trains.
HOST = Memory()
