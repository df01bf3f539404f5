"""A user's iterator of batches as the engine's iterator of Batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nestpipe.adoption.batches import BatchFormat, Reads
from nestpipe.data.batch import Batch

#: How many batches of fewer than two samples are passed over before the check of separability gives up.
_PEEKS = 8


@dataclass(frozen=True)
class _Kept:
    """A batch that has been read before its turn. ``drawn``: the state of torch's generator after it, if it drew."""

    batch: Any
    drawn: Tensor | None


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
        self._kept: deque[_Kept] = deque()
        self._has_ended = False  # seen by ``peek``, and not said yet: an iterator says it once
        self._samples = 0

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Batch:
        batch = self._convert(self._handed_on() if self._kept else self._read(), self._samples)
        self._samples += len(batch)
        return batch

    def peek(self, samples: int) -> Any:
        """The first of the next batches that has so many samples, or else the next one. None if there is no batch.

        The random numbers that this draws count as drawn when the batches are handed on.
        """
        outside = torch.get_rng_state()
        try:
            self._read_ahead(samples)
        finally:
            torch.set_rng_state(outside)
        enough = self._kept and self._size(self._kept[-1].batch) >= samples
        return self._kept[-1 if enough else 0].batch if self._kept else None

    def _read_ahead(self, samples: int) -> None:
        for drawn in [kept.drawn for kept in self._kept if kept.drawn is not None][-1:]:
            torch.set_rng_state(drawn)
        while len(self._kept) < _PEEKS and not self._has_ended:
            if self._kept:
                if self._size(self._kept[-1].batch) >= samples:
                    return
                # A loader may use its tensors again for the next batch.
                self._kept[-1] = replace(self._kept[-1], batch=self._form.copied(self._kept[-1].batch))
            before = torch.get_rng_state()
            try:
                batch = self._read()
            except StopIteration:
                self._has_ended = True
            else:
                after = torch.get_rng_state()
                self._kept.append(_Kept(batch, None if torch.equal(before, after) else after))

    def _handed_on(self) -> Any:
        kept = self._kept.popleft()
        if kept.drawn is not None:
            torch.set_rng_state(kept.drawn)
        return kept.batch

    def _read(self) -> Any:
        if self._has_ended:
            self._has_ended = False
            raise StopIteration
        batch = next(self.source)
        return batch if self._prepare is None else self._prepare(batch)

    def _size(self, batch: Any) -> int:
        try:
            return len(self._form.to_batch(batch, 0, Reads({}, {})))
        except ValueError:
            return 2  # whatever is wrong with it is said when it is converted
