"""Pooled embeddings: one vector per sample and feature, from the rows that have arrived."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: How a sample's rows become one vector.
POOLINGS = ("sum", "mean")


def pool(rows: Tensor, lengths: Tensor, how: str = "sum", weights: Tensor | None = None) -> Tensor:
    """float32 [samples, dim] of ``rows`` [keys, dim] back to back, ``lengths`` int64 [samples]; zero for no rows.

    ``weights`` float32 [keys] multiply the rows before. The mean divides by the number of rows, weighted or not,
    as fbgemm does.
    """
    if weights is not None:
        rows = rows * weights[:, None]
    if len(rows) == len(lengths) and bool((lengths == 1).all()):
        return rows  # one key each: the rows are what is wanted, without a copy
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=rows.device), lengths)
    total = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, sample, rows)
    return total / lengths.clamp(min=1)[:, None] if how == "mean" else total


class PooledEmbeddings(nn.Module):
    """An injected embedding module, pooled: maps the sparse features to [samples, dim] by name.

    ``pooling``: ``sum`` or ``mean`` by feature. ``weights``: names, in the mapping that ``forward`` is given
    next to the features, of jagged float32 weights by feature. Raises ValueError for another pooling.
    """

    def __init__(self, embeddings: nn.Module, pooling: Mapping[str, str]) -> None:
        super().__init__()
        for feature, how in pooling.items():
            if how not in POOLINGS:
                raise ValueError(f"feature '{feature}': pooling '{how}' is not one of {', '.join(POOLINGS)}")
        self.embeddings = embeddings
        self.pooling = dict(pooling)

    def forward(self, sparse: Mapping[str, Any], weights: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        embedded = self.embeddings(sparse)
        return {
            feature: pool(
                embedded[feature].values(),
                embedded[feature].lengths(),
                how,
                weights[feature].values() if weights and feature in weights else None,
            )
            for feature, how in self.pooling.items()
        }
