"""The batches that TorchRec's pipeline reads: with a KeyedJaggedTensor, and equally many on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.keyed_jagged import keyed_jagged_tensor


class HostClock(Protocol):
    """Times a stretch of the host thread: ``with clock.host("P", batch):``."""

    def host(self, stage: str, batch: int) -> AbstractContextManager: ...


class NoClock:
    """The clock of an unobserved trainer."""

    def host(self, stage: str, batch: int) -> AbstractContextManager:
        return nullcontext()


@dataclass(frozen=True)
class KeyedBatch(Pipelineable):
    """A ``Batch`` as TorchRec wants it. ``sparse``: int64 keys and lengths, one stride for all features.

    A batch without samples carries one padding sample without keys, because TorchRec cannot reshape the lengths of
    a stride of zero. ``samples`` is the true count. ``weight``: factor on the sum of this rank's losses that makes
    TorchRec's means over ranks give the gradient of sum of losses / global samples.
    """

    sparse: KeyedJaggedTensor
    sample_ids: Tensor
    extra: Mapping[str, Jagged | Tensor]
    samples: int
    global_samples: int
    weight: float
    number: int
    share: float = 1.0
    clock: HostClock = field(default_factory=NoClock, repr=False)

    def __len__(self) -> int:
        return self.samples

    def to(self, device: torch.device, non_blocking: bool = False) -> KeyedBatch:
        with self.clock.host("H", self.number):
            return replace(
                self,
                sparse=self.sparse.to(device, non_blocking=non_blocking),
                sample_ids=self.sample_ids.to(device, non_blocking=non_blocking),
                extra={name: v.to(device, non_blocking=non_blocking) for name, v in self.extra.items()},
            )

    def record_stream(self, stream: torch.Stream) -> None:
        self.sparse.record_stream(stream)
        Batch({}, self.sample_ids, self.extra).record_stream(stream)


def keyed(
    batch: Batch, features: list[str], world: int, global_samples: int, number: int, clock: HostClock
) -> KeyedBatch:
    """The batch with the named features of ``sparse`` in one KeyedJaggedTensor, in that order."""
    sparse = {name: batch.sparse[name] for name in features}
    if not len(batch):  # the padding sample
        sparse = {name: Jagged(feature.values(), torch.zeros(1, dtype=torch.int64)) for name, feature in sparse.items()}
    weight = world / max(1, global_samples)
    return KeyedBatch(
        keyed_jagged_tensor(sparse),
        batch.sample_ids,
        batch.extra,
        len(batch),
        global_samples,
        weight,
        number,
        batch.share,
        clock,
    )


class AlignedBatches(Iterator[KeyedBatch]):
    """Iterates over a rank's batches so that every rank gets the same number of them.

    Batches with ``global_samples`` are aligned at the source and need no communication. Otherwise the ranks agree
    before each batch, over their own gloo group, by one all-reduce of (batches here, samples, ranks that would
    need an empty batch and have no pattern for it). A rank whose data has ended yields empty batches until all
    have ended. ``count``: batches yielded before this iterator, which is the number of its first batch.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        features: list[str],
        group: dist.ProcessGroup | None,
        world: int,
        count: int,
        clock: HostClock,
    ) -> None:
        self.source = batches
        self.count = count
        self._features = features
        self._group = group
        self._world = world
        self._clock = clock
        self._aligned = False
        self._empty: Batch | None = None
        self._ended = False

    def __next__(self) -> KeyedBatch:
        if self._ended:
            raise StopIteration
        with self._clock.host("P", self.count):
            batch = next(self.source, None)
            if batch is not None:
                self._aligned = batch.global_samples is not None
                self._empty = self._empty or replace(batch.narrow(0, 0), share=1.0)
            samples = batch.global_samples if batch is not None else None
            if not self._aligned:
                batch, samples = self._agree(batch)
            if batch is None:
                self._ended = True
                raise StopIteration
            result = keyed(batch, self._features, self._world, samples or 0, self.count, self._clock)
        self.count += 1
        return result

    def _agree(self, batch: Batch | None) -> tuple[Batch | None, int]:
        """The batch to train on (an empty one if only other ranks have one), and the samples of all ranks."""
        lacks_pattern = batch is None and self._empty is None
        sums = torch.tensor([batch is not None, len(batch) if batch is not None else 0, lacks_pattern]).long()
        if self._world > 1:
            dist.all_reduce(sums, group=self._group)
        present, samples, lacking = sums.tolist()
        if not present:
            return None, 0
        if lacking:
            patterns: list[Batch | None] = [None] * self._world
            dist.all_gather_object(patterns, self._empty, group=self._group)
            self._empty = self._empty or next(p for p in patterns if p is not None)
        return batch if batch is not None else self._empty, samples
