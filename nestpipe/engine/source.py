"""Which iterator each batch is read from, when iterators change while batches are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from nestpipe.data.batch import Batch


class Read(NamedTuple):
    """A batch, or None if the iterator has ended. ``taken``: how many iterators this rank has read from until then.

    ``is_first``: whether it is the first that is read from its iterator.
    """

    batch: Batch | None
    taken: int
    is_first: bool


class Source:
    """The batches of one rank, numbered across iterators.

    An iterator is given for a batch number before that batch is read, so which iterator a batch comes from does not
    depend on when the reading thread runs. Batches that have been read and not trained are kept until ``trained``.
    """

    def __init__(self) -> None:
        self._given: dict[int, tuple[Iterator[Batch], int]] = {}
        self._read: dict[int, Batch | None] = {}
        self._again: deque[Batch] = deque()
        self._last: Iterator[Batch] | None = None
        self._ended: Iterator[Batch] | None = None
        self._begun: Iterator[Batch] | None = None
        self._taken = 0

    def give(self, batches: range, iterator: Iterator[Batch]) -> None:
        """Read the batches with these numbers from ``iterator``. Those that were given one already keep it."""
        if iterator is not self._last:
            self._last = iterator
            self._taken += 1
        for number in batches:
            self._given.setdefault(number, (iterator, self._taken))

    def next_is_first(self, number: int) -> bool:
        """Whether ``read(number)`` will ask a new iterator for its first batch."""
        return not self._again and self._given[number][0] is not self._begun

    def read(self, number: int) -> Read:
        """Batch ``number``. Called once for each number, in order."""
        iterator, taken = self._given[number]
        is_first = self.next_is_first(number)
        if self._again:
            batch: Batch | None = self._again.popleft()
        elif iterator is self._ended:
            batch = None
        else:
            self._begun = iterator
            batch = next(iterator, None)
            if batch is None:
                self._ended = iterator
        self._read[number] = batch
        return Read(batch, taken, is_first)

    def trained(self, number: int) -> None:
        """Batches up to ``number`` are done with."""
        for old in [n for n in self._read if n <= number]:
            del self._read[old], self._given[old]

    def is_from(self, number: int, iterator: Iterator[Batch]) -> bool:
        """Whether batch ``number`` was looked for in ``iterator``."""
        return self._given[number][0] is iterator

    def begin_again(self) -> None:
        """Number what has been read and not trained anew: it is read again, in order, before anything else."""
        self._again.extendleft(
            batch
            for _, batch in sorted(self._read.items(), reverse=True, key=lambda item: item[0])
            if batch is not None
        )
        self._read.clear()
        self._given.clear()

    def drop(self) -> None:
        """Forget all that has been read, and that an iterator has ended: the same one is asked again."""
        self._read.clear()
        self._given.clear()
        self._again.clear()
        self._last = self._ended = self._begun = None
