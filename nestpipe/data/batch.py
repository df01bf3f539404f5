"""One batch of training samples on one rank: plain tensors per feature; needs only torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nestpipe.data.tables import TableConfig


@dataclass(frozen=True)
class Jagged:
    """A list of values per sample, stored back to back.

    ``flat``: [sum of counts] (or [sum of counts, dim] once embedded), any dtype; ``counts``: int64 [samples].
    The three accessors are the part of torchrec's ``JaggedTensor`` interface that a model may use.
    """

    flat: Tensor
    counts: Tensor

    def values(self) -> Tensor:
        return self.flat

    def lengths(self) -> Tensor:
        return self.counts

    def offsets(self) -> Tensor:
        """int64 [samples + 1]: where each sample's values begin; the last entry is the total."""
        return self._offsets

    @cached_property
    def _offsets(self) -> Tensor:
        return torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])

    def narrow(self, start: int, stop: int) -> Jagged:
        """Samples start..stop-1, without a copy."""
        low, high = int(self._offsets[start]), int(self._offsets[stop])
        return Jagged(self.flat[low:high], self.counts[start:stop])

    def select(self, index: Tensor) -> Jagged:
        """The samples named by ``index`` (int64 [k]), in that order."""
        counts = self.counts[index]
        before = counts.cumsum(0) - counts
        where = torch.repeat_interleave(self._offsets[index] - before, counts)
        return Jagged(self.flat[where + torch.arange(len(where), device=where.device)], counts)

    def to(self, device: torch.device, non_blocking: bool = False) -> Jagged:
        flat, counts = (x.to(device, non_blocking=non_blocking) for x in (self.flat, self.counts))
        return Jagged(flat, counts)


@dataclass(frozen=True)
class Batch:
    """A rank's part of one global batch.

    ``sparse``: embedding keys (int64) by feature name; the model decides which table
    a feature reads (``TableConfig.features``). ``extra``: whatever else the dense part needs, by name:
    jagged side information (timestamps) or one tensor row per sample. ``sample_ids``: int64
    [samples], stable names of the samples, which seed everything drawn per sample. ``global_samples``:
    samples of the batch over all ranks, or None if the source does not know it. ``share``: the
    fraction of the rank's batch that this (micro-)batch is; 1.0 for a whole batch. ``reads``: by table, its
    features in this batch; None: those of ``TableConfig.features``. ``form``: what else the batch's source wants to
    find in each of its parts; nothing here looks at it.
    """

    sparse: Mapping[str, Jagged]
    sample_ids: Tensor
    extra: Mapping[str, Jagged | Tensor]
    global_samples: int | None = None
    share: float = 1.0
    reads: Mapping[str, tuple[str, ...]] | None = None
    form: Any = None

    def __len__(self) -> int:
        """Samples on this rank."""
        return len(self.sample_ids)

    def features_of(self, table: TableConfig) -> tuple[str, ...]:
        """The features of this batch that read ``table``."""
        return table.features if self.reads is None else self.reads.get(table.name, ())

    def narrow(self, start: int, stop: int) -> Batch:
        """Samples start..stop-1."""
        return self._map(lambda x: x.narrow(start, stop) if isinstance(x, Jagged) else x[start:stop], stop - start)

    def select(self, index: Tensor) -> Batch:
        """The samples named by ``index`` (int64 [k]), in that order."""
        return self._map(lambda x: x.select(index) if isinstance(x, Jagged) else x[index], len(index))

    def split(self, micro_batches: int) -> list[Batch]:
        """``micro_batches`` consecutive parts. The sizes of those that have samples differ by at most one.

        A batch with fewer samples gives empty parts at the end: zero samples are valid everywhere. A batch of a user's
        own type is not cut into single samples, since many models squeeze their scores and so cannot take one.
        """
        return [self.narrow(a, b) for a, b in pairwise(self._bounds(micro_batches))]

    def places(self, micro_batches: int) -> list[Tensor]:
        """int64: the places in this batch of the samples of each part of ``split``."""
        return [torch.arange(a, b) for a, b in pairwise(self._bounds(micro_batches))]

    def _bounds(self, micro_batches: int) -> list[int]:
        filled = micro_batches if self.form is None else min(micro_batches, max(1, len(self) // 2))
        size, larger = divmod(len(self), filled)
        return [min(m, filled) * size + min(m, larger) for m in range(micro_batches + 1)]

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self._map(lambda x: x.to(device, non_blocking=non_blocking), len(self))

    def record_stream(self, stream: Any) -> None:
        for value in (*self.sparse.values(), *self.extra.values(), self.sample_ids):
            tensors = (value.flat, value.counts) if isinstance(value, Jagged) else (value,)
            for tensor in tensors:
                tensor.record_stream(stream)

    def _map(self, function: Any, samples: int) -> Batch:
        # Ids may be in both mappings: what is one object stays one, and is cut once.
        objects = {id(value): value for value in (*self.sparse.values(), *self.extra.values())}
        done = {key: function(value) for key, value in objects.items()}
        return replace(
            self,
            sparse={name: done[id(value)] for name, value in self.sparse.items()},
            extra={name: done[id(value)] for name, value in self.extra.items()},
            sample_ids=function(self.sample_ids),
            share=self.share * samples / len(self) if len(self) else 0.0,
        )
