"""The dual buffer and its synchronisation: one buffer serves the current batch while the other is filled for the next.

The schedule's ring ``buffer`` says how many buffers there are (two in NestPipe) and which batch uses which.
"""

from __future__ import annotations

from torch import Tensor

from nestpipe.embedding.memory import HOST, Memory
from nestpipe.embedding.retrieval_write_back import Rows, empty_rows


class RowBuffer:
    """Memory for the rows of a batch. It grows to the largest batch seen so far, and is reused for every batch."""

    def __init__(self, dim: int, state_width: int, memory: Memory = HOST):
        self._memory = memory
        self._room = empty_rows(0, dim, state_width, memory)
        self._count = 0

    def resize(self, count: int) -> Rows:
        """Memory for ``count`` rows. The old contents are lost."""
        if len(self._room) < count:
            dim, state_width = self._room.weight.shape[1], self._room.state.shape[1]
            self._room = empty_rows(0, dim, state_width, self._memory)  # free before allocating
            # An eighth is spare: batches differ a little in size, and each growth costs page faults.
            self._room = empty_rows(count + count // 8, dim, state_width, self._memory)
        self._count = count
        return self.rows

    @property
    def rows(self) -> Rows:
        """The rows of the current batch, without a copy."""
        return self._room.first(self._count)


def synchronise(new: Rows, old: Rows, new_index: Tensor, old_index: Tensor) -> None:
    """Dual-buffer synchronisation: copy the updated rows that two neighbouring batches share to the newer buffer.

    ``new_index``, ``old_index``: int64 [shared], positions of the shared rows in ``new`` and in ``old``.
    """
    new.weight.index_copy_(0, new_index, old.weight.index_select(0, old_index))
    if new.state.shape[1]:
        new.state.index_copy_(0, new_index, old.state.index_select(0, old_index))
