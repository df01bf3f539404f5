"""The embedding module that is injected into a model: it returns the rows that have arrived for a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.tables import TableConfig


class ReceivedEmbeddings(nn.Module):
    """Replaces a torchrec ``EmbeddingCollection``: maps the sparse features to ``Jagged`` rows by name.

    The engine sets the micro-batch's rows before the forward pass. They are in the order of the keys, so the keys
    that the model passes are ignored.
    """

    def __init__(self, tables: Sequence[TableConfig]):
        super().__init__()
        self._tables = tables
        self._jagged: dict[str, Jagged] = {}

    def set(self, received: Tensor, inverse: Tensor, part: Batch) -> None:
        """``received`` float32 [rows, dim]: a leaf that collects the gradient. ``inverse`` int64 [keys]: their rows."""
        features = [feature for table in self._tables for feature in part.features_of(table)]
        counts = [part.sparse[feature].values().numel() for feature in features]
        # One gather for all features: its backward is then one scatter, not one per feature.
        rows = received.index_select(0, inverse).split(counts)
        frozen = {f for table in self._tables if table.frozen for f in part.features_of(table)}
        self._jagged = {
            # Rows of a frozen table get no gradient.
            feature: Jagged(values.detach() if feature in frozen else values, part.sparse[feature].lengths())
            for feature, values in zip(features, rows, strict=True)
        }

    def forward(self, sparse: Mapping[str, Any]) -> dict[str, Jagged]:
        return self._jagged
