"""Ranking quality, leave-one-out: the rank of each user's test item among all unseen items.

HR@k: share of users whose test item is among the first k. NDCG@k: mean over users of 1 / log2(1 + rank) if
the test item is among the first k, else 0. Equal scores rank by item id, so that results do not depend on sort
order. A score that is not a number ranks behind all others. Users whose test item is among those they have seen
(synthetic histories repeat items) are left out.
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
#: Users and items that are scored at once, which bounds memory.
USERS_AT_ONCE, ITEMS_AT_ONCE = 128, 1 << 16


def evaluate(
    model: nn.Module, item_table: Tensor, dataset: Dataset, cutoffs: Sequence[int] = CUTOFFS
) -> dict[str, float]:
    """``{"HR@10": ..., "NDCG@10": ..., ..., "users": number counted}`` in one process, on its CPU.

    ``model``: the sequence model or its ``dense`` part (``encode``, ``represent``); its embedding module
    is not used. ``item_table``: float32 [items, dim], the whole trained table.
    """
    dense: Any = copy.deepcopy(getattr(model, "dense", model)).cpu()  # a copy: training is not affected
    item_table = item_table.cpu()
    # One buffer for all scores: fresh pages would cost more than the product.
    memory = torch.empty(USERS_AT_ONCE * min(ITEMS_AT_ONCE, dataset.items))

    with torch.no_grad():
        items = dense.represent(item_table)

        def score(users: np.ndarray) -> Callable[[int, int], Tensor]:
            query = _queries(dense, item_table, dataset, users)

            def block(low: int, high: int) -> Tensor:
                out = memory[: len(users) * (high - low)].view(len(users), high - low)
                return torch.mm(query, items[low:high].T, out=out)

            return block

        return _summary(_ranks(score, dataset), cutoffs)


def _queries(dense: Any, item_table: Tensor, dataset: Dataset, users: np.ndarray) -> Tensor:
    """float32 [users, dim]: the query after each user's latest items; zero for a user without history."""
    counts = np.minimum(dataset.lengths[users], dataset.sequence_length)
    items, times = dataset.read(users, dataset.lengths[users] - counts, counts)
    lengths = torch.from_numpy(counts)
    index = padded_index(lengths, max(1, int(counts.max())), len(items))
    embedded = pad(item_table[torch.from_numpy(items)], index)
    queries = dense.encode(embedded, pad(torch.from_numpy(times), index))
    last = (lengths - 1).clamp(min=0)
    return queries[torch.arange(len(users)), last] * (lengths > 0)[:, None]


def _seen(dataset: Dataset, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The users' whole training histories, flat, and each entry's index in ``users``."""
    counts = dataset.lengths[users]
    items, _ = dataset.read(users, np.zeros_like(counts), counts)
    return items, np.repeat(np.arange(len(users)), counts)


def _ranks(score: Callable[[np.ndarray], Callable[[int, int], Tensor]], dataset: Dataset) -> Tensor:
    """int64 [users counted]: 1 + the number of unseen items that score higher, or equal with a smaller id.

    ``score``: users -> (low, high) -> float32 [users, high - low], of items low to high - 1; read before the next call.
    """
    ranks = [np.empty(0, dtype=np.int64)]
    pieces = [(low, min(low + ITEMS_AT_ONCE, dataset.items)) for low in range(0, dataset.items, ITEMS_AT_ONCE)]
    for users in _chunks(np.flatnonzero(dataset.test_items >= 0)):
        target = dataset.test_items[users]
        items, owner = _seen(dataset, users)
        owner, items = np.divmod(np.unique(owner * dataset.items + items), dataset.items)  # histories repeat items
        new = np.ones(len(users), dtype=bool)
        new[owner[items == target[owner]]] = False
        scores, mine = score(users), np.empty(len(users), dtype=np.float32)
        for low, high in pieces:
            block = scores(low, high).numpy()
            here = (target >= low) & (target < high)
            mine[here] = block[here, target[here] - low]
        rank = np.ones(len(users), dtype=np.int64)
        for low, high in pieces:
            block = block if len(pieces) == 1 else scores(low, high).numpy()
            for u, row in enumerate(block):  # a row fits in the cache, a block does not
                before = row[: max(0, target[u] - low)]
                rank[u] += np.count_nonzero(row > mine[u]) + np.count_nonzero(before == mine[u])
            seen = (items >= low) & (items < high)
            who, what = owner[seen], items[seen]
            value = block[who, what - low]
            ahead = (value > mine[who]) | ((value == mine[who]) & (what < target[who]))
            rank -= np.bincount(who[ahead], minlength=len(users))
        # No comparison with NaN is true, so a model that has diverged would rank every test item first.
        unseen = dataset.items - np.bincount(owner, minlength=len(users))
        rank = np.where(np.isnan(mine), unseen, rank)
        ranks.append(rank[new])
    return torch.from_numpy(np.concatenate(ranks))


def _summary(ranks: Tensor, cutoffs: Sequence[int]) -> dict[str, float]:
    result = {}
    for k in cutoffs:
        inside = ranks <= k
        result[f"HR@{k}"] = inside.double().mean().item()
        result[f"NDCG@{k}"] = (inside / torch.log2(1.0 + ranks.double())).mean().item()
    return result | {"users": float(len(ranks))}


def _chunks(users: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(users), USERS_AT_ONCE):
        yield users[start : start + USERS_AT_ONCE]
