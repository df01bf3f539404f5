"""Key-centric sample clustering (FWP's companion): micro-batches of equal size with few distinct keys in total.

Each micro-batch deduplicates its own keys, so a key travels once per micro-batch that holds it. The cost is therefore
the sum over micro-batches of their distinct keys. This is a balanced hypergraph partition: samples are vertices, keys
are nets, and the cost is the sum over keys of the micro-batches that hold it. The paper prints no pseudo-code. Steps:

1. *growth*: parts are filled one after the other; each takes the sample with most keys in common with it. A rare key
   counts more, since a key that many samples hold will be in every part whatever is done.
2. *exchange*: passes over the samples; each changes places with the sample of another part whose exchange saves most
   keys (Kernighan and Lin's move; keys are counted exactly, sizes stay).

If most keys are in many samples (MovieLens), growth is tried with two sets of weights, and the better result is kept.

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

from nestpipe.clustering.numpy_form import Parts
from nestpipe.data.batch import Batch
from nestpipe.data.tables import TableConfig
from nestpipe.machine.native import library

_PASSES, _TRIES = 1, 2
#: Penalties for spreading a key over one more part; growth is tried with each.
_PENALTIES = (0.5, 1.0)
#: Samples per shared key from which on the second penalty is tried.
_DENSE = 12
_MAX_SAMPLES = 65_535  # counts are 16 bits wide


def clustered(batches: Iterator[Batch], tables: Sequence[TableConfig], micro_batches: int) -> Iterator[Batch]:
    """``batches`` with the samples of each in the order in which ``Batch.split(micro_batches)`` cuts good parts."""
    for batch in batches:
        yield cluster_batch(batch, tables, micro_batches)


def cluster_batch(batch: Batch, tables: Sequence[TableConfig], micro_batches: int) -> Batch:
    """The same samples, those of one micro-batch next to each other, in their old order inside it."""
    if micro_batches == 1 or len(batch) <= micro_batches or len(batch) > _MAX_SAMPLES:
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
    keys: np.ndarray,
    offsets: np.ndarray,
    parts: int,
    passes: int = _PASSES,
    tries: int = _TRIES,
    penalties: tuple[float, ...] = _PENALTIES,
    native: bool = True,
) -> np.ndarray:
    """int32 [samples]: each sample's part; the first samples % parts parts hold one sample more.

    ``keys``: int64; feature f of sample s holds ``keys[offsets[f, s]:offsets[f, s + 1]]``. ``passes``: of exchange,
    at most; ``tries``: partners looked at exactly; ``penalties``: for spreading a key over one more part. The result
    depends only on the arguments. ``native=False``: in numpy, about 50 times slower, with the same result; also used
    if nothing compiles.
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
    """int64 [penalties, samples + 1]: by degree, what keeping a key out of a part saves. Integers keep sums exact."""
    saved = np.stack([(1 - penalty / parts) ** np.arange(samples + 1) for penalty in penalties])
    return 1 + np.floor(2.0**20 * saved).astype(np.int64)


def distinct_keys(keys: np.ndarray, offsets: np.ndarray, part: np.ndarray) -> int:
    """The objective: distinct keys of each part, summed."""
    of = np.concatenate([np.repeat(part, np.diff(row)) for row in offsets]).astype(np.int64)
    return len(np.unique(np.stack([of, np.concatenate([keys[row[0] : row[-1]] for row in offsets])]), axis=1).T)


def _pointer(array: np.ndarray) -> Any:
    return array.ctypes.data_as(ctypes.c_void_p)
