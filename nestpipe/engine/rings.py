"""The rings in which stages hand their results to one another, with the slots that the schedule declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nestpipe.embedding.dual_buffer import RowBuffer
from nestpipe.schedule.operations import Ref, Schedule


class Rings:
    """``rings["plan-1", ref]`` is the slot that ``Schedule.slot`` names, by the arithmetic that the checker proves.

    A slot is None until a stage puts something there. The slots of ``buffer`` always hold row buffers.
    """

    def __init__(self, schedule: Schedule, row_buffer: Callable[[], RowBuffer]):
        self._schedule = schedule
        self._slots: dict[str, list[Any]] = {name: [None] * size for name, size in schedule.rings.items()}
        self._slots["buffer"] = [row_buffer() for _ in range(schedule.rings["buffer"])]

    def __getitem__(self, at: tuple[str, Ref]) -> Any:
        name, index = self._schedule.slot(*at)
        return self._slots[name][index]

    def __setitem__(self, at: tuple[str, Ref], value: Any) -> None:
        name, index = self._schedule.slot(*at)
        self._slots[name][index] = value

    def clear(self) -> None:
        """Empty all slots except the row buffers, which keep their memory."""
        for name, slots in self._slots.items():
            if name != "buffer":
                slots[:] = [None] * len(slots)
