"""Signals to a job as flags, and one answer for all ranks."""

from __future__ import annotations

import signal
import types
from typing import Any

#: What a rank was told, the larger overrides: nothing; save and go on; save and stop.
NOTHING, SAVE, SAVE_AND_STOP = 0, 1, 2


class Flag:
    """Raised by SIGTERM (save) and SIGUSR2 (save and stop); submitit's handler is kept for later."""

    def __init__(self) -> None:
        self._told = NOTHING
        self.submitit_handler: Any = signal.getsignal(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        self._told = max(self._told, SAVE_AND_STOP if number == signal.SIGUSR2 else SAVE)

    def take(self) -> int:
        """What came since the last call."""
        told, self._told = self._told, NOTHING
        return told


class Agreement:
    """The largest flag of all ranks, known one step later, so that no step waits for it. Collective."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._value = torch.zeros(1, dtype=torch.int64)
        self._group = dist.new_group(backend="gloo")
        self._work: Any = None

    def of_all(self, mine: int) -> int:
        """Call once per step on every rank: the answer to what the ranks said in the call before."""
        import torch.distributed as dist

        agreed = NOTHING
        if self._work is not None:
            self._work.wait()
            agreed = int(self._value)
        self._value.fill_(mine)
        self._work = dist.all_reduce(self._value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def close(self) -> None:
        """Wait for the last exchange, which ranks that end orderly all take part in."""
        if self._work is not None:
            self._work.wait()
            self._work = None
