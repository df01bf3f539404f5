"""Cuts a data set of user histories into batches, in the same way for every source.

A sample is a window of one user's training history: up to ``sequence_length + 1`` items in time
order; all but the last are inputs, all but the first are targets. Its sparse features are

* ``history``: the window's items, jagged;
* ``negatives``: ``negatives`` items per sample, uniform, a function of (seed, epoch, sample id).

``extra`` holds ``timestamps`` (int64 seconds, jagged like the history) and the ids again
as ``history_ids`` (jagged) and ``negative_ids`` (int64 [samples, negatives]). The dense part
needs them to mask accidental hits, and a pipeline may have consumed the sparse features by then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from nestpipe.data import counter_random as draws
from nestpipe.data.batch import Batch, Jagged

Reader = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]

_FINGERPRINT_ITEMS = 1_000_000
_NEGATIVES = 1  # separates draws for one purpose from those for another


class DataError(ValueError):
    """The data cannot be used. One line: where, what is wrong, what to do."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Histories:
    """What a data source provides: the histories of all users, read on demand.

    ``items``: size of the vocabulary; ids are 0..items-1. ``lengths``: int64 [users], items of each
    user's training history. ``test_items``: int64 [users], the item after it, -1 if there is
    none. ``read(users, starts, counts)``: items and timestamps (int64, flat, back to back) of
    positions starts..starts+counts-1 of the users' histories; position ``lengths[user]`` is the test item.
    ``bad_rows``: rows skipped; ``bad_row_examples``: the first few, named.
    """

    items: int
    lengths: np.ndarray
    test_items: np.ndarray
    read: Reader
    bad_rows: int = 0
    bad_row_examples: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset(Histories):
    """Histories and how they are cut into samples and batches: a rank reads only the samples of its own slices.

    ``windows``: ``last`` makes one sample per user from the latest items and drops older ones. ``all`` cuts a
    history into consecutive samples that overlap by one item, so that each item but the first is a target once.
    """

    batch_size: int
    negatives: int
    sequence_length: int
    windows: str
    seed: int

    @property
    def notes(self) -> list[str]:
        """What a record should say of the data; empty if nothing was skipped."""
        if not self.bad_rows:
            return []
        return [f"{self.bad_rows} malformed rows were skipped: " + "; ".join(self.bad_row_examples)]

    @cached_property
    def fingerprint(self) -> str:
        """Tells this data from other data: a hash of all lengths and test items, and of the histories of users spread
        evenly over all, up to a million items."""
        digest = hashlib.sha256(f"{self.items}".encode())
        for values in (self.lengths, self.test_items):
            digest.update(values.astype(np.int64).tobytes())
        every = max(1, -(-int(self.lengths.sum()) // _FINGERPRINT_ITEMS))
        users = np.arange(0, self.users, every)
        for some in np.array_split(users, max(1, len(users) // 1024)):
            for values in self.read(some, np.zeros_like(some), self.lengths[some]):
                digest.update(values.astype(np.int64).tobytes())
        return digest.hexdigest()[:16]

    @property
    def users(self) -> int:
        return len(self.lengths)

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return int(self._first_sample[-1])

    @cached_property
    def _first_sample(self) -> np.ndarray:
        """int64 [users + 1]: where each user's samples begin."""
        if self.windows == "last":
            return np.arange(self.users + 1)
        per_user = np.maximum(1, -(-(self.lengths - 1) // self.sequence_length))
        return np.concatenate([[0], np.cumsum(per_user)])

    def steps_per_epoch(self, world_size: int) -> int:
        return -(-self.samples // (self.batch_size * world_size))

    def batches(self, rank: int, world_size: int, start_step: int = 0, epochs: int | None = None) -> Iterator[Batch]:
        """This rank's part of the global batches from ``start_step`` to the end of ``epochs`` epochs (None: no end).

        A global batch is the next ``batch_size * world_size`` samples of the epoch's permutation
        (fewer at its end); rank r takes the r-th contiguous slice, which may be empty. Every rank
        yields the same number of batches. Starting at a later step gives the batches that a run from step 0 has there.
        """
        steps = self.steps_per_epoch(world_size)
        step = start_step
        while epochs is None or step < epochs * steps:
            epoch, within = divmod(step, steps)
            order = np.random.default_rng([self.seed, epoch]).permutation(self.samples)
            for t in range(within, steps):
                chunk = order[t * self.batch_size * world_size : (t + 1) * self.batch_size * world_size]
                bounds = [len(chunk) * r // world_size for r in (rank, rank + 1)]
                yield self.make_batch(chunk[slice(*bounds)], epoch, len(chunk))
            step = (epoch + 1) * steps

    def make_batch(self, sample_ids: np.ndarray, epoch: int, global_samples: int) -> Batch:
        """The samples ``sample_ids`` (int64 [k]) with the negatives of ``epoch``."""
        users = np.searchsorted(self._first_sample, sample_ids, side="right") - 1
        lengths = self.lengths[users]
        longest = self.sequence_length + 1
        if self.windows == "last":
            starts = np.maximum(lengths - longest, 0)
        else:
            starts = (sample_ids - self._first_sample[users]) * self.sequence_length
        counts = np.minimum(lengths - starts, longest)
        items, timestamps = self.read(users, starts, counts)
        negatives = draws.integers(
            self.items, self.seed, _NEGATIVES, epoch, sample_ids[:, None], np.arange(self.negatives)[None, :]
        ).reshape(len(sample_ids), self.negatives)
        history = Jagged(torch.from_numpy(items), torch.from_numpy(counts))
        negative_ids = torch.from_numpy(negatives)
        per_sample = torch.full((len(sample_ids),), self.negatives, dtype=torch.int64)
        return Batch(
            sparse={"history": history, "negatives": Jagged(negative_ids.flatten(), per_sample)},
            sample_ids=torch.from_numpy(np.asarray(sample_ids, dtype=np.int64)),
            extra={
                "timestamps": Jagged(torch.from_numpy(timestamps), history.counts),
                "history_ids": history,
                "negative_ids": negative_ids,
            },
            global_samples=global_samples,
        )


def flat_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64 [sum of counts]: ``counts[i]`` consecutive integers from ``starts[i]``, for each i in turn."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
