"""Which iterator each batch is read from, when iterators change while batches are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nestpipe.data.batch import Batch


class _Given(NamedTuple):
    """``taken``: how many iterators the rank had been given until then. The same object may come back later."""

    iterator: Iterator[Batch]
    taken: int


class Source:
    """The batches of one rank, numbered across iterators.

    An iterator is given for a batch number before that batch is read, so which iterator a batch comes from does not
    depend on when the reading thread runs. Batches that have been read are kept until ``trained``. Only ``read`` and
    ``new_iterator`` may be called while another thread uses the source.
    """

    def __init__(self) -> None:
        self._given: dict[int, _Given] = {}
        self._read: dict[int, Batch | None] = {}
        self._kept: dict[int, Batch | None] = {}  # read before the pipeline started again, by new numbers
        self._newest: Iterator[Batch] | None = None
        self._taken = 0
        self._begun = self._ended = 0  # which iterator, by ``taken``, was asked last, and which has ended
        self._closing = False

    def give(self, batches: range, iterator: Iterator[Batch]) -> None:
        """Read the batches with these numbers from ``iterator``. Those that were given one already keep it."""
        if iterator is not self._newest:
            self._newest = iterator
            self._taken += 1
        for number in batches:
            self._given.setdefault(number, _Given(iterator, self._taken))

    def new_iterator(self, number: int) -> int:
        """The number of the iterator that ``read(number)`` asks for its first batch, or 0 if it has been asked."""
        taken = self._given[number].taken
        return 0 if number in self._kept or taken == self._begun else taken

    def read(self, number: int) -> tuple[Batch | None, int]:
        """Batch ``number``, None if its iterator has ended, and how many iterators were given until then.

        Called once for each number, in order.
        """
        iterator, taken = self._given[number]
        batch: Batch | None = None
        if number in self._kept:
            batch = self._kept.pop(number)
        elif taken != self._ended and not self._closing:
            self._begun = taken
            batch = next(iterator, None)
            if batch is None:
                self._ended = taken
        self._read[number] = batch
        return batch, taken

    def trained(self, number: int) -> None:
        """Batch ``number`` is done with."""
        self._read.pop(number, None)
        self._given.pop(number, None)

    def is_newest(self, number: int) -> bool:
        """Whether batch ``number`` was looked for in the iterator that was given last."""
        return self._given[number].taken == self._taken

    def begin_again(self, number: int) -> None:
        """The iterator of batch ``number`` has ended on all ranks: what comes from later ones is counted from there.

        Ranks have been given the same iterators for the same numbers, so all of them keep equally many,
        even if one of them found no batch.
        """
        past = self._given[number].taken
        later = [old for old in sorted(self._given) if self._given[old].taken > past]
        given, read = self._given, self._read
        self._given = {number + n: given[old] for n, old in enumerate(later)}
        self._kept = {number + n: read[old] for n, old in enumerate(later)}
        self._read = {}

    def drop(self) -> None:
        """Forget all that has been read, and that an iterator has ended: the same one is asked again."""
        self._given, self._read, self._kept = {}, {}, {}
        self._newest = None

    def close(self) -> None:
        """Ask no iterator for another batch."""
        self._closing = True
