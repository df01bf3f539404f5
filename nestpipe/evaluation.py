"""Ranking quality, leave one out: where each user's test item stands among all items the user has not seen.

HR@k: share of users whose test item is among the first k. NDCG@k: mean of 1 / log2(1 + rank) there, 0
elsewhere. Equal scores rank by item id, so that a result does not depend on a sort's whims. Users whose
test item is among those they have seen (synthetic histories repeat items) are left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.data.dataset import Dataset
from nestpipe.models.hstu import pad, padded_index

CUTOFFS = (10, 50)
_USERS, _ITEMS = 128, 1 << 16  # scored at once: bounds memory


def evaluate(
    model: nn.Module, item_table: Tensor, dataset: Dataset, cutoffs: Sequence[int] = CUTOFFS
) -> dict[str, float]:
    """``{"HR@10": ..., "NDCG@10": ..., ..., "users": how many count}`` in one process, on its CPU.

    ``model``: the sequence model or its ``dense`` part (``encode``, ``represent``); its embedding module
    is not used. ``item_table``: float32 [items, dim], the whole trained table.
    """
    dense: Any = copy.deepcopy(getattr(model, "dense", model)).cpu()  # the copy: training goes on where it was
    item_table = item_table.cpu()

    def score(users: np.ndarray) -> Callable[[int, int], Tensor]:
        query = _queries(dense, item_table, dataset, users)
        return lambda low, high: query @ dense.represent(item_table[low:high]).T

    with torch.no_grad():
        return _summary(_ranks(score, dataset), cutoffs)


def popularity_baseline(dataset: Dataset, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, float]:
    """The same figures when every user is shown the items most often seen in training."""
    counts = torch.zeros(dataset.items)
    for users in _chunks(np.arange(dataset.users)):
        counts += torch.from_numpy(_seen(dataset, users)[0]).bincount(minlength=dataset.items)
    return _summary(_ranks(lambda users: lambda low, high: counts[low:high].repeat(len(users), 1), dataset), cutoffs)


def _queries(dense: Any, item_table: Tensor, dataset: Dataset, users: np.ndarray) -> Tensor:
    """float32 [users, dim]: what follows each user's latest items; zero without history."""
    counts = np.minimum(dataset.lengths[users], dataset.sequence_length)
    items, times = dataset.read(users, dataset.lengths[users] - counts, counts)
    lengths = torch.from_numpy(counts)
    index = padded_index(lengths, max(1, int(counts.max())), len(items))
    embedded = pad(item_table[torch.from_numpy(items)], index)
    queries = dense.encode(embedded, pad(torch.from_numpy(times), index))
    last = (lengths - 1).clamp(min=0)
    return queries[torch.arange(len(users)), last] * (lengths > 0)[:, None]


def _seen(dataset: Dataset, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The users' whole training histories, flat, and each entry's place in ``users``."""
    counts = dataset.lengths[users]
    items, _ = dataset.read(users, np.zeros_like(counts), counts)
    return items, np.repeat(np.arange(len(users)), counts)


def _ranks(score: Callable[[np.ndarray], Callable[[int, int], Tensor]], dataset: Dataset) -> Tensor:
    """int64 [users who count]: 1 + unseen items that score higher, or equal with a smaller id."""
    ranks = [torch.empty(0, dtype=torch.int64)]
    for users in _chunks(np.flatnonzero(dataset.test_items >= 0)):
        target = torch.from_numpy(dataset.test_items[users])
        items, owner = (torch.from_numpy(x) for x in _seen(dataset, users))
        new = torch.ones(len(users), dtype=torch.bool)
        new[owner[items == target[owner]]] = False
        pieces = [(low, min(low + _ITEMS, dataset.items)) for low in range(0, dataset.items, _ITEMS)]
        scores, mine = score(users), torch.empty(len(users))
        for low, high in pieces:
            here = (target >= low) & (target < high)
            mine[here] = scores(low, high)[here, target[here] - low]
        rank = torch.ones(len(users), dtype=torch.int64)
        for low, high in pieces:
            block = scores(low, high)
            ahead = (block > mine[:, None]) | ((block == mine[:, None]) & (torch.arange(low, high) < target[:, None]))
            seen = (items >= low) & (items < high)
            ahead[owner[seen], items[seen] - low] = False
            rank += ahead.sum(1)
        rank = rank[new]
        ranks.append(rank)
    return torch.cat(ranks)


def _summary(ranks: Tensor, cutoffs: Sequence[int]) -> dict[str, float]:
    result = {}
    for k in cutoffs:
        inside = ranks <= k
        result[f"HR@{k}"] = inside.double().mean().item()
        result[f"NDCG@{k}"] = (inside / torch.log2(1.0 + ranks.double())).mean().item()
    return result | {"users": float(len(ranks))}


def _chunks(users: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(users), _USERS):
        yield users[start : start + _USERS]
