"""Ours, not fbgemm's: a CPU kernel for ``fbgemm::jagged_unique_indices``, which TorchRec's index deduplication calls.

fbgemm 1.8 has this operator only for CUDA, so ``use_index_dedup=True`` raises on a CPU. The kernel here gives
what the CUDA one gives by its documentation and its source: per table, the distinct keys of all its features in
ascending order. How many of them count for which sample is arbitrary, because ``reverse_indices`` undoes it after
the lookup. They are spread evenly over the lengths of the table's features.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor


def jagged_unique_indices(
    hash_size_cumsum: Tensor, hash_size_offsets: Tensor, offsets: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(lengths, offsets, unique, reverse), all int64, of keys that are stored feature after feature.

    ``hash_size_cumsum`` [features + 1]: what to add to a feature's keys so that tables do not overlap (features of
    one table share it). ``hash_size_offsets``: where each table's features begin; between equal neighbours there is no
    table. ``offsets`` [features * samples + 1], ``indices`` [keys]. ``unique[reverse] == indices``.
    """
    features = len(hash_size_cumsum) - 1
    samples = (len(offsets) - 1) // max(1, features)
    per_feature = offsets[::samples].diff() if samples else torch.zeros(features, dtype=torch.int64)
    base = torch.repeat_interleave(hash_size_cumsum[:-1], per_feature)
    distinct, reverse = torch.unique(indices + base, return_inverse=True)
    # A table's keys are one range of the linear numbers, and there is nothing beyond the last range.
    lengths = torch.zeros(features * samples, dtype=torch.int64)
    unique = torch.empty_like(distinct)
    starts = hash_size_offsets.tolist()
    for begin, end in pairwise(starts):
        if begin == end:
            continue
        low, high = hash_size_cumsum[begin], hash_size_cumsum[end]
        first, last = torch.searchsorted(distinct, torch.stack([low, high])).tolist()
        unique[first:last] = distinct[first:last] - low
        places = (end - begin) * samples
        if places:
            share, more = divmod(last - first, places)
            lengths[begin * samples : end * samples] = share
            lengths[begin * samples : begin * samples + more] += 1
    return lengths, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), unique, reverse


@cache
def register() -> torch.library.Library | None:
    """Give the operator its CPU kernel, once per process, unless the installed fbgemm has one."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::jagged_unique_indices", "CPU"):
        return None
    library = torch.library.Library("fbgemm", "IMPL")
    library.impl("jagged_unique_indices", jagged_unique_indices, "CPU")
    return library
