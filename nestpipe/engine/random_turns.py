"""Keeps the random numbers of the forward pass and of the user's iterator apart, so that runs repeat.

Both may draw from torch's generator (dropout; negatives, augmentation), and they run on two threads that share it.
Whoever came first would get other numbers in each run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: So many forward passes are watched before it is decided that they draw nothing.
_WATCHED = 4


class RandomTurns:
    """``decide`` comes before the first forward pass; ``reading`` and ``computing`` are around what may draw.

    If reads draw, they go on with torch's generator, as in a loop without a pipeline, and forward and backward passes
    have a state of their own. The two then exclude each other. If forward passes turn out to draw nothing, this ends;
    when exactly it ends cannot change a number. If reads draw nothing, nothing is changed. Samplers draw a seed in the
    first read from their iterator. If that happens while a pipeline is full, it gets a state of its own. A loader
    that begins to draw later is not noticed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._passes = 0
        self._passes_draw = False
        self._reads_draw = False
        self._state: Tensor | None = None  # of forward and backward passes
        self.undecided = True

    def decide(self, read: Callable[[], object]) -> None:
        """Call ``read`` once for the first batch, and twice more to see whether reads draw."""
        read()
        before = torch.get_rng_state()
        read()
        read()
        after = torch.get_rng_state()
        self._reads_draw = not torch.equal(before, after)
        self._state = torch.Generator().manual_seed(_number(after)).get_state()
        self.undecided = False

    @contextmanager
    def reading(self, new_iterator: int) -> Iterator[None]:
        """``new_iterator``: its number if this is the first read from an iterator while others are in flight, or 0."""
        if new_iterator:
            with self._lock:
                outside = torch.get_rng_state()
                torch.manual_seed(_number(torch.tensor([torch.initial_seed() % 2**31, new_iterator])))
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
            outside = torch.get_rng_state() if self._reads_draw else None
            if outside is not None and self._state is not None:
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
