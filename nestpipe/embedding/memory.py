"""The one place that allocates what the engine's stages hand to one another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """Allocates tensors on one device: rings, buffers, received rows, accumulators and flat gradients."""

    device: str = "cpu"

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor with undefined values."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


#: The memory of tables, keys and routing plans, which are on the host for every training device.
HOST = Memory()
