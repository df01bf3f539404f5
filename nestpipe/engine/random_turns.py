"""Keeps the random numbers of the forward pass and of the user's iterator apart, so that runs repeat.

Both may draw from torch's generator (dropout; negatives, augmentation), and they run on two threads that share it.
Whoever came first would get other numbers in each run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: So many forward passes are watched before it is decided that they draw nothing.
_WATCHED = 4
#: The last batch, counted from the first, that is read before the first forward pass to see whether reads draw.
WATCHED_READS = 2


class RandomTurns:
    """``reading`` is around each read of a batch and ``computing`` around each forward or backward pass.

    ``decide`` comes between the first reads and the first pass. If reads draw, they keep torch's generator, as in
    a loop without a pipeline, and passes have a state of their own. The two then exclude each other. If passes turn
    out to draw nothing, this ends; when exactly it ends cannot change a number. If reads draw nothing, nothing changes.

    The first read from an iterator does not count, because samplers draw a seed there. If it happens while other
    batches are in flight, it gets a state of its own. A loader that begins to draw later is not noticed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reads = self._passes = 0
        self._seen = torch.get_rng_state()  # the generator's state after the watched reads
        self._passes_draw = False
        self._reads_draw = False
        self._undecided = True
        self._state: Tensor | None = None  # of passes, if reads draw

    @property
    def active(self) -> bool:
        """Whether reads draw. A step then ends after its read, so what a caller draws in between repeats too."""
        return self._reads_draw

    def decide(self, ahead: int) -> None:
        """``ahead``: how many batches before its own step a batch is read. 0: reads and passes never overlap.

        With 1, only the first batch has been read by now, so that reads are assumed to draw.
        """
        if not self._undecided:
            return
        self._undecided = False
        self._reads_draw = ahead == 1 or (ahead > 1 and self._reads_draw)
        if self._reads_draw:
            self._state = torch.Generator().manual_seed(_number(self._seen)).get_state()

    @contextmanager
    def reading(self, new_iterator: int, is_empty: bool) -> Iterator[None]:
        """``new_iterator``: its number if this is the first read from an iterator, or 0. ``is_empty``: the pipeline is
        empty."""
        if self._reads <= WATCHED_READS:  # no pass has begun
            self._reads += 1
            before = torch.get_rng_state()
            yield
            self._seen = torch.get_rng_state()
            self._reads_draw |= not new_iterator and not torch.equal(before, self._seen)
        elif new_iterator and not is_empty:
            with self._lock:
                outside = torch.get_rng_state()
                generator = torch.Generator().manual_seed((torch.initial_seed() + new_iterator) % 2**62)
                torch.set_rng_state(generator.get_state())
                try:
                    yield
                finally:
                    torch.set_rng_state(outside)
        elif self._reads_draw and not self._quiet:
            with self._lock:
                yield
        else:
            yield

    @property
    def _quiet(self) -> bool:
        return self._passes >= _WATCHED and not self._passes_draw

    @contextmanager
    def computing(self, is_forward: bool) -> Iterator[None]:
        """A backward pass does not count: with activation checkpointing it sets the generator back for a while."""
        if self._quiet:
            yield
            return
        with self._lock:
            outside = torch.get_rng_state() if self._state is not None else None
            if self._state is not None:
                torch.set_rng_state(self._state)
            before = torch.get_rng_state() if is_forward and not self._passes_draw else None
            try:
                yield
            finally:
                if before is not None:
                    self._passes += 1
                    self._passes_draw = not torch.equal(before, torch.get_rng_state())
                if outside is not None:
                    self._state = torch.get_rng_state()
                    torch.set_rng_state(outside)


def _number(state: Tensor) -> int:
    """A seed that depends on all of a generator's state."""
    weights = torch.arange(1, len(state) + 1, dtype=torch.int64) * 2654435761 % 2147483647
    return int((state.long() * weights).sum() % (2**62))
