"""Makes all ranks agree on the signals that some of them received."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from slurm.preemption import NOTHING


class FlagAgreement:
    """The largest flag of all ranks, known one step later, so that no step waits for it. Collective."""

    def __init__(self) -> None:
        self._value = torch.zeros(1, dtype=torch.int64)
        self._group = dist.new_group(backend="gloo")
        self._work: Any = None

    def of_all(self, mine: int) -> int:
        """Call once per step on every rank. Returns the largest flag that the ranks passed in the previous call."""
        agreed = NOTHING
        if self._work is not None:
            self._work.wait()
            agreed = int(self._value)
        self._value.fill_(mine)
        self._work = dist.all_reduce(self._value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def close(self) -> None:
        """Wait for the last exchange. All ranks that end normally take part in it."""
        if self._work is not None:
            self._work.wait()
            self._work = None
