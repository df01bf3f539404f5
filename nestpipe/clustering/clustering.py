"""Key-centric sample clustering (FWP's companion): micro-batches of equal size with few distinct keys in total.

Each micro-batch deduplicates its own keys, so a key is sent once per micro-batch that has it. The cost is therefore
the sum over micro-batches of their distinct keys. This is a balanced hypergraph partition. Samples are vertices and
keys are nets. The cost is the sum over keys of the number of micro-batches that have the key. The paper gives no
pseudo-code. The steps here are:

1. *growth*: parts are filled one after the other. Each repeatedly takes the sample with the most keys in common with
   it. A rare key counts more, since a key of many samples will be in every part anyway.
2. *exchange*: passes over the samples. Each is swapped with the sample of another part whose swap saves the most
   keys. This is the move of Kernighan and Lin; keys are counted exactly, and sizes do not change.

If most keys are in many samples (MovieLens), growth is tried with two sets of weights, and the better result is kept.

Samples are only re-ordered inside the batch, so the summed gradient is the same up to rounding. A batch of 512
samples with 26 to 115 keys each takes 1 to 3 ms, and 7 ms for MovieLens in 32 parts. This is C code on the thread that
reads the batch, and it does not hold the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestpipe.clustering.numpy_form import Parts
from nestpipe.data.batch import Batch
from nestpipe.data.tables import TableConfig
from nestpipe.machine.native import library

_PASSES, _TRIES = 1, 2
#: Penalties for spreading a key over one more part. Growth is tried with each of them.
_PENALTIES = (0.5, 1.0)
#: From this many samples per shared key on, the second penalty is tried as well.
_DENSE = 12
_MAX_SAMPLES = 65_535  # counts are 16 bits wide


def clustered(batches: Iterator[Batch], tables: Sequence[TableConfig], micro_batches: int) -> Iterator[Batch]:
    """``batches``, each with its samples in such an order that ``Batch.split(micro_batches)`` gives good parts."""
    for batch in batches:
        yield cluster_batch(batch, tables, micro_batches)


def cluster_batch(batch: Batch, tables: Sequence[TableConfig], micro_batches: int) -> Batch:
    """The same samples, ordered by micro-batch. Inside a micro-batch they keep their old order."""
    if micro_batches == 1 or len(batch) <= micro_batches or len(batch) > _MAX_SAMPLES:
        return batch
    keys, offsets = batch_pins(batch, tables)
    part = cluster(keys, offsets, micro_batches)
    return batch.select(torch.from_numpy(np.argsort(part, kind="stable")))


def batch_pins(batch: Batch, tables: Sequence[TableConfig]) -> tuple[np.ndarray, np.ndarray]:
    """The batch's keys, int64, one number per (table, row), and their offsets, int64 [features, samples + 1]."""
    pieces, offsets, base, count = [], [], 0, 0
    for table in tables:
        for feature in batch.features_of(table):
            jagged = batch.sparse[feature]
            pieces.append(jagged.values().numpy() + base)
            offsets.append(jagged.offsets().numpy() + count)
            count += len(pieces[-1])
        base += table.rows
    if not pieces:
        return np.zeros(0, dtype=np.int64), np.zeros((0, len(batch) + 1), dtype=np.int64)
    return np.concatenate(pieces), np.stack(offsets)


def cluster(
    keys: np.ndarray,
    offsets: np.ndarray,
    parts: int,
    passes: int = _PASSES,
    tries: int = _TRIES,
    penalties: tuple[float, ...] = _PENALTIES,
    native: bool = True,
) -> np.ndarray:
    """int32 [samples]: the part of each sample. The first samples % parts parts have one sample more than the others.

    ``keys``: int64; feature f of sample s has ``keys[offsets[f, s]:offsets[f, s + 1]]``. ``passes``: the maximum
    number of exchange passes. ``tries``: how many partners are counted exactly. ``penalties``: those for spreading a
    key over one more part. The result depends only on the arguments. ``native=False`` uses numpy, which is about 50
    times slower and gives the same result. It is also used if no compiler works. Raises MemoryError.
    """
    samples = offsets.shape[1] - 1
    sizes = np.full(parts, samples // parts, dtype=np.int32)
    sizes[: samples % parts] += 1
    weights = _weights(samples, parts, penalties)
    compiled = library(Path(__file__).with_name("clustering.c")) if native else None
    if compiled is None:
        return Parts(keys, offsets, parts).best(sizes, weights, passes, tries, _DENSE)
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
def _weights(samples: int, parts: int, penalties: tuple[float, ...]) -> np.ndarray:
    """int64 [penalties, samples + 1]: by degree, what it saves to keep a key out of a part. Integer sums are exact."""
    saved = np.stack([(1 - penalty / parts) ** np.arange(samples + 1) for penalty in penalties])
    return 1 + np.floor(2.0**20 * saved).astype(np.int64)


def distinct_keys(keys: np.ndarray, offsets: np.ndarray, part: np.ndarray) -> int:
    """The objective: the sum over parts of their distinct keys."""
    of = np.concatenate([np.repeat(part, np.diff(row)) for row in offsets]).astype(np.int64)
    return len(np.unique(np.stack([of, np.concatenate([keys[row[0] : row[-1]] for row in offsets])]), axis=1).T)


def _pointer(array: np.ndarray) -> Any:
    return array.ctypes.data_as(ctypes.c_void_p)
