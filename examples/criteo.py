"""A stream like Criteo's: 26 categorical features with one or more values each, 13 dense features, and a click.

Table sizes are those of the Criteo Display Advertising Challenge (26 categorical columns), capped. Keys follow a
power law, as they do in Criteo's data. The click is drawn from a hidden linear score of the dense features and the
keys, so that there is something to learn. Sample i is a function of (seed, i).

The DLRM examples use it. ``nestpipe run`` cannot: it trains on user histories (``nestpipe.datasets.loader``), and
this stream has none.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from nestpipe.data import counter_random as draws
from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.tables import TableConfig

DENSE_FEATURES = 13
#: Distinct values of the 26 columns, capped at 100,000.
CARDINALITIES = (
    1460, 583, 100_000, 100_000, 305, 24, 12_517, 633, 3, 93_145, 5683, 100_000, 3194,
    27, 14_992, 100_000, 10, 5652, 2173, 4, 100_000, 18, 15, 100_000, 105, 100_000,
)  # fmt: skip
FEATURES = tuple(f"cat_{n}" for n in range(len(CARDINALITIES)))
_KEY, _DENSE, _CLICK, _TASTE, _COUNT = range(200, 205)  # purposes of draws


def criteo_tables(dim: int) -> tuple[TableConfig, ...]:
    """One table per categorical feature."""
    return tuple(
        TableConfig(f"table_{feature}", rows, dim, (feature,), scale=rows**-0.5)
        for feature, rows in zip(FEATURES, CARDINALITIES, strict=True)
    )


def criteo_batches(
    batch_size: int, seed: int = 1, rank: int = 0, world_size: int = 1, batches: int | None = None, most_values: int = 1
) -> Iterator[Batch]:
    """``batches`` batches (None: endless) for ``rank``, with 1 to ``most_values`` keys per feature and sample.

    ``extra``: ``dense`` float32 [samples, 13] in [0, 1) and ``label`` float32 [samples], 0 or 1.
    """
    step = 0
    while batches is None or step < batches:
        first = (step * world_size + rank) * batch_size
        yield _batch(np.arange(first, first + batch_size), seed, batch_size * world_size, most_values)
        step += 1


def _batch(ids: np.ndarray, seed: int, global_samples: int, most_values: int) -> Batch:
    columns = np.arange(DENSE_FEATURES)
    dense = draws.uniform(seed, _DENSE, ids[:, None], columns[None, :])
    score = 2 * (dense - 0.5) @ (draws.uniform(seed, _TASTE, columns) - 0.5)
    sparse = {}
    for f, (feature, rows) in enumerate(zip(FEATURES, CARDINALITIES, strict=True)):
        counts = 1 + draws.integers(most_values, seed, _COUNT, f, ids)
        sample = np.repeat(ids, counts)
        nth = np.arange(len(sample)) - np.repeat(np.cumsum(counts) - counts, counts)
        # Log-uniform: key k has a share of about 1 / k.
        keys = np.minimum(np.floor(rows ** draws.uniform(seed, _KEY, f, sample, nth)).astype(np.int64) - 1, rows - 1)
        taste = draws.uniform(seed, _TASTE, 1000 + f, keys) - 0.5
        score += np.bincount(np.repeat(np.arange(len(ids)), counts), weights=taste, minlength=len(ids))
        sparse[feature] = Jagged(torch.from_numpy(keys), torch.from_numpy(counts))
    clicks = draws.uniform(seed, _CLICK, ids) < 1 / (1 + np.exp(1.0 - score))
    return Batch(
        sparse=sparse,
        sample_ids=torch.from_numpy(ids),
        extra={
            "dense": torch.from_numpy(dense.astype(np.float32)),
            "label": torch.from_numpy(clicks.astype(np.float32)),
        },
        global_samples=global_samples,
    )
