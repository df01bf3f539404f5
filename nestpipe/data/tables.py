"""Embedding tables, as data sets and models name them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TableConfig:
    """One embedding table: ``rows`` x ``dim`` float32; ``features`` are the keys of ``Batch.sparse`` that read it.

    A row's initial value is uniform in (-scale, scale) and depends only on (seed, name, row). If ``fill`` is given, it
    fills rows, block by block, in place. A ``frozen`` table's rows are looked up and never changed.
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    scale: float
    frozen: bool = False
    fill: Callable[[Tensor], object] | None = None
