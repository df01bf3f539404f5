"""The dual buffer and its synchronisation: one serves the batch in training, the other is filled for the next."""

from __future__ import annotations

from torch import Tensor

from nestpipe.embedding.retrieval_write_back import Rows, empty_rows


class DualBuffer:
    """A ring of row buffers, two in NestPipe: one serves batch t while the other is filled for t + 1.

    A buffer grows to the largest batch seen and is reused from then on.
    """

    def __init__(self, slots: int, dim: int, state_width: int):
        self._rows = [empty_rows(0, dim, state_width) for _ in range(slots)]
        self._counts = [0] * slots

    def resize(self, slot: int, count: int) -> Rows:
        """Room for ``count`` rows in ``slot``; the old contents are lost."""
        rows = self._rows[slot]
        if len(rows) < count:
            # An eighth of slack: batches differ a little in size, and each growth costs page faults.
            room = count + count // 8
            self._rows[slot] = empty_rows(0, rows.weight.shape[1], rows.state.shape[1])  # free before allocating
            self._rows[slot] = empty_rows(room, rows.weight.shape[1], rows.state.shape[1])
        self._counts[slot] = count
        return self[slot]

    def __getitem__(self, slot: int) -> Rows:
        return self._rows[slot].first(self._counts[slot])

    def synchronise(self, target: int, source: int, target_index: Tensor, source_index: Tensor) -> None:
        """Dual-buffer synchronisation: copy the rows that two neighbouring batches share, updated, into the newer."""
        new, old = self[target], self[source]
        new.weight.index_copy_(0, target_index, old.weight.index_select(0, source_index))
        if new.state.shape[1]:
            new.state.index_copy_(0, target_index, old.state.index_select(0, source_index))
