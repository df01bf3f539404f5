"""Which iterator each batch is read from, when iterators change while batches are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from nestpipe.data.batch import Batch


class Read(NamedTuple):
    """A batch, or None if the iterator has ended. ``taken``: how many iterators this rank has read from until then."""

    batch: Batch | None
    taken: int


class Source:
    """The batches of one rank, numbered across iterators.

    An iterator is given for a batch number before that batch is read, so which iterator a batch comes from does not
    depend on when the reading thread runs. Batches that have been read and not trained are kept until ``trained``.
    """

    def __init__(self) -> None:
        self._given: dict[int, tuple[Iterator[Batch], int]] = {}
        self._read: dict[int, Batch | None] = {}
        self._again: deque[Batch | Exception] = deque()  # read ahead of their numbers, or what was raised then
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

    def new_iterator(self, number: int) -> int:
        """The number of the iterator that ``read(number)`` asks for its first batch, or 0 if it has been asked."""
        iterator, taken = self._given[number]
        return 0 if self._again or iterator is self._begun else taken

    def read_ahead(self, number: int) -> None:
        """Read one batch more from the iterator of batch ``number``, for a later ``read``."""
        iterator, _ = self._given[number]
        if iterator is self._ended or any(isinstance(batch, Exception) for batch in self._again):
            return
        self._begun = iterator
        try:
            self._again.append(next(iterator))
        except StopIteration:
            self._ended = iterator
        except Exception as error:  # belongs to the batch that could not be read
            self._again.append(error)

    def read(self, number: int) -> Read:
        """Batch ``number``. Called once for each number, in order."""
        iterator, taken = self._given[number]
        if self._again:
            ahead = self._again.popleft()
            if isinstance(ahead, Exception):
                raise ahead
            batch: Batch | None = ahead
        elif iterator is self._ended:
            batch = None
        else:
            self._begun = iterator
            batch = next(iterator, None)
            if batch is None:
                self._ended = iterator
        self._read[number] = batch
        return Read(batch, taken)

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
