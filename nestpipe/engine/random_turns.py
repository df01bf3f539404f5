"""The forward pass and the user's iterator draw from torch's generator in turns, so that runs repeat.

Both may draw random numbers (dropout; negatives, augmentation), and they run on two threads that share one generator.
Whoever came first would get other numbers in each run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: So many reads and forward passes are watched before it is decided whether turns are needed.
_WATCHED = 4


class RandomTurns:
    """``reading`` is around each read of a batch; ``computing`` is around each forward or backward pass.

    At first they exclude each other. Reads use a generator state of their own, and each notes whether it drew. If both
    draw, this goes on. If only one does, reads stop waiting. When exactly they stop cannot change a result: if reads
    draw nothing, their state does not matter; if forward passes draw nothing, then the generator goes on with the
    state of the reads. The first read from an iterator does not count, because samplers draw a seed there. It takes
    its turn in any case. A loader that begins to draw later is not noticed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reads = self._passes = 0
        self._reads_draw = self._passes_draw = False
        self._watching = True
        self._state: Tensor | None = None  # of the reads, from the second one on

    @contextmanager
    def reading(self, is_first: bool) -> Iterator[None]:
        """``is_first``: the read is the first from its iterator."""
        if not (self._watching or (self._passes_draw and (is_first or self._reads_draw))):
            yield
            return
        with self._lock:
            if self._state is None:  # nothing else runs before the first batch has been read
                yield
                generator = torch.Generator().manual_seed(_number(torch.get_rng_state()))
                self._state = generator.get_state()
                return
            outside = torch.get_rng_state()
            torch.set_rng_state(self._state)
            try:
                yield
            finally:
                state = torch.get_rng_state()
                if not is_first and self._watching:
                    self._reads += 1
                    self._reads_draw |= not torch.equal(state, self._state)
                self._state = state
                torch.set_rng_state(outside)
                self._decide()

    @contextmanager
    def computing(self, is_forward: bool) -> Iterator[None]:
        """A backward pass is not watched: with activation checkpointing it sets the generator back for a while."""
        if not (self._watching or self._passes_draw):
            yield
            return
        with self._lock:
            before = torch.get_rng_state() if self._watching and is_forward else None
            yield
            if before is not None:
                self._passes += 1
                self._passes_draw |= not torch.equal(before, torch.get_rng_state())
                self._decide()

    def _decide(self) -> None:
        if not self._watching or min(self._reads, self._passes) < _WATCHED:
            return
        self._watching = False
        if self._reads_draw and not self._passes_draw:
            assert self._state is not None
            torch.set_rng_state(self._state)


def _number(state: Tensor) -> int:
    """A seed that depends on all of a generator's state."""
    weights = torch.arange(1, len(state) + 1, dtype=torch.int64) * 2654435761 % 2147483647
    return int((state.long() * weights).sum() % (2**62))
