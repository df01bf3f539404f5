"""A user's iterator of batches as the engine's iterator of Batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from nestpipe.adoption.batches import BatchFormat, Reads
from nestpipe.data.batch import Batch

#: How many batches of fewer than two samples are passed over before the check of separability gives up.
_PEEKS = 8


class Stream:
    """``source`` as an iterator of Batch: each of its batches is prepared and then converted, given its first number.

    ``prepare``: a function of a batch, or None. ``form``: cuts batches, for the number of their samples.
    """

    def __init__(
        self,
        source: Iterator[Any],
        prepare: Callable[[Any], Any] | None,
        convert: Callable[[Any, int], Batch],
        form: BatchFormat,
    ) -> None:
        self.source = source
        self._prepare = prepare
        self._convert = convert
        self._form = form
        self._kept: deque[Any] = deque()
        self._samples = 0

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Batch:
        batch = self._convert(self._kept.popleft() if self._kept else self._read(), self._samples)
        self._samples += len(batch)
        return batch

    def peek(self, samples: int) -> Any:
        """The first of the next batches that has so many samples, or else the next one. None if there is no batch."""
        while len(self._kept) < _PEEKS:
            if self._kept and self._size(self._kept[-1]) >= samples:
                return self._kept[-1]
            if self._kept:  # a loader may use its tensors again for the next batch
                self._kept[-1] = self._form.copied(self._kept[-1])
            try:
                self._kept.append(self._read())
            except StopIteration:
                break
        return self._kept[0] if self._kept else None

    def _read(self) -> Any:
        batch = next(self.source)
        return batch if self._prepare is None else self._prepare(batch)

    def _size(self, batch: Any) -> int:
        try:
            return len(self._form.to_batch(batch, 0, Reads({}, {})))
        except ValueError:
            return 2  # whatever is wrong with it is said when it is converted
