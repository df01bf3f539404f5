"""Lanes run the operations of a schedule: each runs its own one at a time, in schedule order, after their waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from nestpipe.measurement.trace import Span
from nestpipe.schedule.operations import Ref, Schedule

Execute = Callable[[Ref], None]


class LaneStopped(RuntimeError):
    """Raised in whatever waits for lanes after an operation has failed. ``__cause__`` is the first error."""


class Lanes(Protocol):
    """All lanes of a schedule on one rank. One thread drives them, step after step."""

    def start(self, first_step: int) -> None:
        """Begin at ``first_step``. The lanes must be idle."""
        ...

    def run_step(self, step: int) -> None:
        """Hand ``step`` to every lane. On return the compute lane has finished its part of the step."""
        ...

    def wait(self, ref: Ref) -> None:
        """Wait until ``ref`` (absolute batch) has run. Its step must have been handed over before."""
        ...

    def drain(self, seconds: float | None = None) -> None:
        """Wait until every lane has run everything that was handed to it, or until so many seconds have passed."""
        ...

    def stop(self, error: BaseException) -> None:
        """Let no lane begin another operation, because of ``error`` on the driving thread."""
        ...

    def take_spans(self) -> list[Span]:
        """Spans of the operations that have finished since the last call."""
        ...

    def close(self) -> None:
        """End the lanes, also after an error."""
        ...


#: Makes the lanes of a schedule, given a function that runs one operation, named with its absolute batch.
MakeLanes = Callable[[Schedule, Execute], Lanes]


class OneAtATime:
    """Runs the schedule's list one operation at a time, in schedule order, on the caller's thread."""

    def __init__(self, schedule: Schedule, execute: Execute):
        self._ops = [(op.ref, op.lane) for op in schedule.ops]
        self._execute = execute
        self._spans: list[Span] = []

    def start(self, first_step: int) -> None:
        pass

    def run_step(self, step: int) -> None:
        for ref, lane in self._ops:
            named = ref._replace(batch=ref.batch + step)
            begin = time.perf_counter_ns()
            self._execute(named)
            self._spans.append(Span(*named, lane, begin, time.perf_counter_ns()))

    def wait(self, ref: Ref) -> None:
        pass

    def drain(self, seconds: float | None = None) -> None:
        pass

    def stop(self, error: BaseException) -> None:
        pass

    def take_spans(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    def close(self) -> None:
        pass
