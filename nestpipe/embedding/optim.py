"""Sparse update rules, applied once per batch to the rows of the active buffer.

The formulas are those of fbgemm's exact kernels, so that real TorchRec and this engine train alike.
"""

from __future__ import annotations

from torch import Tensor

from nestpipe.embedding.table import Rows
from nestpipe.trainer import SparseOptimizer

#: float32 state values per row.
STATE_WIDTH = {"sgd": 0, "rowwise_adagrad": 1}


def state_width(optimizer: SparseOptimizer) -> int:
    """Raises ValueError for an unknown rule, listing the known ones."""
    if optimizer.name not in STATE_WIDTH:
        raise ValueError(f"unknown sparse optimizer '{optimizer.name}', one of {', '.join(STATE_WIDTH)}")
    return STATE_WIDTH[optimizer.name]


def sparse_update(optimizer: SparseOptimizer, rows: Rows, gradient: Tensor) -> None:
    """Update ``rows`` in place from ``gradient`` float32 [n, dim], which is used up.

    sgd: w -= lr g. rowwise_adagrad: s += mean over dim of g^2; w -= lr g / (sqrt(s) + eps).
    """
    if optimizer.name == "rowwise_adagrad":
        # A norm reads the gradient once; squaring it first would write a copy.
        rows.state += gradient.norm(dim=1, keepdim=True).square_().div_(gradient.shape[1])
        gradient.div_(rows.state.sqrt().add_(optimizer.eps))
    rows.weight.add_(gradient, alpha=-optimizer.lr)
