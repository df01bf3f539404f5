"""A baseline that a trained recommender must beat: everybody is shown the items that are seen most often."""

from __future__ import annotations

import numpy as np

from nestpipe.data.dataset import Dataset


def popularity_hit_rate(dataset: Dataset, k: int = 10) -> float:
    """HR@k if each user is shown the items most often seen in training that this user has not seen; ties by id."""
    starts = np.zeros_like(dataset.lengths)
    items, _ = dataset.read(np.arange(dataset.users), starts, dataset.lengths)
    order = np.argsort(-np.bincount(items, minlength=dataset.items), kind="stable")
    hits = []
    for seen, test in zip(np.split(items, np.cumsum(dataset.lengths)[:-1]), dataset.test_items, strict=True):
        if test >= 0 and test not in seen:
            hits.append(test in order[~np.isin(order, seen)][:k])
    return float(np.mean(hits))
