"""Key-centric sample clustering (FWP's companion): micro-batches of equal size with few distinct keys in total.

Each micro-batch deduplicates its own keys, so a key travels once per micro-batch that holds it. What is made
small is therefore the sum over micro-batches of their distinct keys: a balanced hypergraph partition, samples
being vertices, keys nets and the sum of (micro-batches per key) the cost. The paper prints no pseudo-code; this is

1. *growth*: parts one after the other; each takes the sample with most keys in common with it, where a rare key
   counts more, for one that many samples hold will be in every part whatever is done;
2. *exchange*: passes over the samples; each is exchanged with the one of another part whose exchange saves most
   keys (Kernighan and Lin's move, keys counted exactly, sizes kept).

Where most keys are in many samples (MovieLens), growth is tried with two sets of weights, and the better result kept.

Samples are only re-ordered inside the batch, so the summed gradient is the same up to rounding. A batch of 512
samples x 26 to 115 keys takes 1 to 3 ms, 7 for MovieLens in 32 parts, in C on the thread that reads it, without the
interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import flat_ranges
from nestpipe.data.tables import TableConfig
from nestpipe.machine.native import library

_PASSES, _TRIES = 1, 2
_STARTS, _DENSE = (0.5, 1.0), 12  # how much a part more is feared; samples per shared key that make it worth a second
_MOST_SAMPLES = 65_535  # counts are 16 bits wide


def clustered(batches: Iterator[Batch], tables: Sequence[TableConfig], micro_batches: int) -> Iterator[Batch]:
    """``batches`` with the samples of each in the order in which ``Batch.split(micro_batches)`` cuts good parts."""
    for batch in batches:
        yield cluster_batch(batch, tables, micro_batches)


def cluster_batch(batch: Batch, tables: Sequence[TableConfig], micro_batches: int) -> Batch:
    """The same samples, those of one micro-batch side by side, in their old order inside it."""
    if micro_batches == 1 or len(batch) <= micro_batches or len(batch) > _MOST_SAMPLES:
        return batch
    keys, offsets = batch_pins(batch, tables)
    part = cluster(keys, offsets, micro_batches)
    return batch.select(torch.from_numpy(np.argsort(part, kind="stable")))


def batch_pins(batch: Batch, tables: Sequence[TableConfig]) -> tuple[np.ndarray, np.ndarray]:
    """int64 keys, a number for each (table, row), and their offsets, int64 [features, samples + 1]."""
    pieces, offsets, base, count = [], [], 0, 0
    for table in tables:
        for feature in table.features:
            jagged = batch.sparse[feature]
            pieces.append(jagged.values().numpy() + base)
            offsets.append(jagged.offsets().numpy() + count)
            count += len(pieces[-1])
        base += table.rows
    return np.concatenate(pieces), np.stack(offsets)


def cluster(
    keys: np.ndarray, offsets: np.ndarray, parts: int, passes: int = _PASSES, tries: int = _TRIES, native: bool = True
) -> np.ndarray:
    """int32 [samples]: each sample's part; the first samples % parts parts hold one sample more.

    ``keys``: int64; feature f of sample s holds ``keys[offsets[f, s]:offsets[f, s + 1]]``. ``passes``: of exchange,
    at most; ``tries``: partners looked at exactly. Depends on its arguments alone. ``native=False``: in numpy, about
    50 times slower, with the same result; also the fallback where nothing compiles.
    """
    samples = offsets.shape[1] - 1
    sizes = np.full(parts, samples // parts, dtype=np.int32)
    sizes[: samples % parts] += 1
    weights = _weights(samples, parts, _STARTS)
    compiled = library(Path(__file__).with_name("clustering.c")) if native else None
    if compiled is None:
        return _Problem(keys, offsets, parts).solve(sizes, weights, passes, tries)
    part = np.empty(samples, dtype=np.int32)
    keys, offsets = (np.ascontiguousarray(x, dtype=np.int64) for x in (keys, offsets))
    failed = compiled.cluster(
        _pointer(keys), _pointer(offsets), len(offsets), samples, parts, _pointer(sizes), _pointer(weights),
        len(weights), _DENSE, passes, tries, _pointer(part),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"clustering {len(keys)} keys into {parts} parts")
    return part


@functools.lru_cache(maxsize=64)
def _weights(samples: int, parts: int, starts: tuple[float, ...]) -> np.ndarray:
    """int64 [starts, samples + 1]: what keeping a key of this degree out of a part saves, so that sums stay exact."""
    saved = np.stack([(1 - fear / parts) ** np.arange(samples + 1) for fear in starts])
    return 1 + np.floor(2.0**20 * saved).astype(np.int64)


def distinct_keys(keys: np.ndarray, offsets: np.ndarray, part: np.ndarray) -> int:
    """The objective: distinct keys of each part, summed."""
    of = np.concatenate([np.repeat(part, np.diff(row)) for row in offsets]).astype(np.int64)
    return len(np.unique(np.stack([of, np.concatenate([keys[row[0] : row[-1]] for row in offsets])]), axis=1).T)


def _pointer(array: np.ndarray) -> Any:
    return array.ctypes.data_as(ctypes.c_void_p)


class _Problem:
    """The algorithm of clustering.c in numpy, move by move: its reference, and its stand-in without a compiler."""

    def __init__(self, keys: np.ndarray, offsets: np.ndarray, parts: int) -> None:
        n = offsets.shape[1] - 1
        sample = np.concatenate([np.repeat(np.arange(n), np.diff(row)) for row in offsets])
        pins = np.unique(np.stack([keys, sample]), axis=1)
        _, key, degree = np.unique(pins[0], return_inverse=True, return_counts=True)
        shared = degree[key] > 1
        _, key = np.unique(key[shared], return_inverse=True)
        sample = pins[1][shared]  # sorted by key, then sample
        self.of_key, self.degree = sample, np.bincount(key)
        self.key_first = np.cumsum(self.degree) - self.degree
        order = np.argsort(sample, kind="stable")
        self.of_sample = np.split(key[order], np.cumsum(np.bincount(sample, minlength=n))[:-1])
        self.count = np.zeros((len(self.degree), parts), dtype=np.int64)
        self.near = np.zeros((n, parts), dtype=np.int64)
        self.part = np.full(n, -1, dtype=np.int32)

    def solve(self, sizes: np.ndarray, weights: np.ndarray, passes: int, tries: int) -> np.ndarray:
        dense = len(self.of_key) >= _DENSE * len(self.degree)
        best, least = self.part, np.inf
        for start in weights if dense else weights[:1]:
            self.part = np.full_like(self.part, -1)
            self.count[:], self.near[:] = 0, 0
            self._grow(sizes, start)
            for _ in range(passes):
                if not self._exchange(tries):
                    break
            found = int((self.count > 0).sum())
            if found < least:
                best, least = self.part, found
        return best

    def _samples_of(self, keys: np.ndarray) -> np.ndarray:
        return self.of_key[flat_ranges(self.key_first[keys], self.degree[keys])]

    def _grow(self, sizes: np.ndarray, weights: np.ndarray) -> None:
        shared_keys = np.array([len(keys) for keys in self.of_sample])
        for m, size in enumerate(sizes):
            common = np.zeros(len(self.part), dtype=np.int64)
            for t in range(size):
                score = np.where(self.part < 0, common if t else shared_keys, -1)
                best = int(score.argmax())
                self.part[best] = m
                keys = self.of_sample[best]
                new = keys[self.count[keys, m] == 0]
                self.count[keys, m] += 1
                np.add.at(common, self._samples_of(new), np.repeat(weights[self.degree[new]], self.degree[new]))
        for s, keys in enumerate(self.of_sample):
            count = self.count[keys]
            self.near[s] = (count > 0).sum(0)
            self.near[s, self.part[s]] -= (count[:, self.part[s]] == 1).sum()

    def _shift(self, x: int, m: int, by: int) -> None:
        """Sample x enters part m or leaves it; ``near`` of the samples that notice follows."""
        if by < 0:
            self.part[x] = -1
        keys = self.of_sample[x]
        self.count[keys, m] += by
        others = self.count[keys, m] - (by > 0)
        for left in (0, 1):
            touched = self._samples_of(keys[others == left])
            touched = touched[(touched != x) & ((self.part[touched] == m) | (left == 0))]
            np.add.at(self.near, (touched, m), by)
        if by > 0:
            self.part[x] = m

    def _exchange(self, tries: int) -> int:
        swaps = 0
        everyone = np.arange(len(self.part))
        for x in everyone:
            a = self.part[x]
            gain = self.near[x, self.part] - self.near[x, a] + self.near[:, a] - self.near[everyone, self.part]
            gain[self.part == a] = 0
            best, best_gain = -1, 0
            for y in np.argsort(-gain, kind="stable")[:tries]:
                if gain[y] <= best_gain:
                    break
                both = self.count[np.intersect1d(self.of_sample[x], self.of_sample[y])]
                exact = gain[y] - (both[:, a] < 2).sum() - (both[:, self.part[y]] < 2).sum()
                if exact > best_gain:
                    best, best_gain = int(y), exact
            if best < 0:
                continue
            b = self.part[best]
            for sample, m, by in ((x, a, -1), (best, b, -1), (x, b, 1), (best, a, 1)):
                self._shift(int(sample), int(m), by)
            swaps += 1
        return swaps
