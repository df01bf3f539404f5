"""Pooled embeddings: one vector per sample and feature, from the rows that have arrived."""

from __future__ import annotations

import torch
from torch import Tensor


def pool(rows: Tensor, lengths: Tensor, how: str = "sum", weights: Tensor | None = None) -> Tensor:
    """float32 [samples, dim]: the pooled rows of each sample; zero for a sample without rows.

    ``rows`` float32 [keys, dim]: those of all samples back to back. ``lengths`` int64 [samples]: how many each has.
    ``how``: ``sum`` or ``mean``. ``weights`` float32 [keys]: multiply the rows first. The mean divides by the number
    of rows, weighted or not, as fbgemm does.
    """
    if weights is not None:
        rows = rows * weights[:, None]
    if len(rows) == len(lengths) and bool((lengths == 1).all()):
        return rows  # with one key per sample the rows are the result, without a copy
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=rows.device), lengths)
    total = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, sample, rows)
    return total / lengths.clamp(min=1)[:, None] if how == "mean" else total
