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

#: So many reads and so many forward passes are watched before it is decided whether turns are needed.
_WATCHED = 6


class RandomTurns:
    """``reading`` is around each read of a batch; ``computing`` is around each forward or backward pass.

    At first they exclude each other. Reads use a generator state of their own, and it is noted whether one of the
    first ``_WATCHED`` reads and one of the first ``_WATCHED`` forward passes draws. If both draw, turns stay. Else
    reads stop waiting. What is found depends on counts and not on time. When exactly reads stop cannot change a result
    either: if reads draw nothing, it does not matter which state they find; if forward passes draw nothing, then the
    generator continues with the state of the reads.

    The first read from an iterator does not count, because samplers draw a seed there. It takes its turn in any case.
    A loader or a model that begins to draw after its first batches is not noticed.
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
        if not (self.active or (self._passes_draw and is_first)):
            yield
            return
        with self._lock:
            if self._state is None:  # nothing else runs before the first batch has been read
                yield
                generator = torch.Generator().manual_seed(_number(torch.get_rng_state()))
                self._state = generator.get_state()
                return
            if not self._watching and not self._passes_draw:  # this was decided while the read waited for its turn
                yield
                return
            outside = torch.get_rng_state()
            torch.set_rng_state(self._state)
            try:
                yield
            finally:
                state = torch.get_rng_state()
                if not is_first and self._reads < _WATCHED:
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
            before = torch.get_rng_state() if is_forward and self._passes < _WATCHED else None
            yield
            if before is not None:
                self._passes += 1
                self._passes_draw |= not torch.equal(before, torch.get_rng_state())
                self._decide()

    @property
    def active(self) -> bool:
        """Whether turns are taken. A step then ends after its read, so what a caller draws in between repeats too."""
        return self._watching or (self._reads_draw and self._passes_draw)

    def _decide(self) -> None:
        if not self._watching or min(self._reads, self._passes) < _WATCHED:
            return
        self._watching = False
        if not self._passes_draw:
            assert self._state is not None
            torch.set_rng_state(self._state)


def _number(state: Tensor) -> int:
    """A seed that depends on all of a generator's state."""
    weights = torch.arange(1, len(state) + 1, dtype=torch.int64) * 2654435761 % 2147483647
    return int((state.long() * weights).sum() % (2**62))
