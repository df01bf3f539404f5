"""Lanes run the operations of a schedule: one at a time on a lane, in schedule order, after what they wait for.

``ThreadLanes`` has a thread per lane; ``OneAtATime`` runs the same list on the caller's thread.
Both have the interface ``start``, ``run_step``, ``wait``, ``drain``, ``close``, so that CUDA streams can follow.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nestpipe.measurement.trace import Span
from nestpipe.schedule.operations import Ref, Schedule

#: Seconds a lane may hold the interpreter while another asks for it. Python's 5 ms would let one
#: lane's small operations wait for a whole forward pass of another's.
_SWITCH_INTERVAL = 5e-5

Execute = Callable[[Ref], None]
Delay = Callable[[Ref], float]


class LaneStopped(RuntimeError):
    """Raised in what waits on lanes after an operation has failed; ``__cause__`` is the first error."""


@dataclass
class _Lane:
    """``done``: operations finished since ``start``; others wait on it under ``changed``."""

    name: str
    program: list[tuple[Ref, list[tuple[_Lane, int, int]]]] = field(default_factory=list)
    done: int = 0
    submitted: int = 0
    steps: deque[int] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)


class ThreadLanes:
    """A thread per lane; the ``inline`` lane, if there is one, runs on the thread that calls ``run_step``.

    ``execute`` runs one operation, named with its absolute batch. ``delay``: seconds to sleep before
    an operation, for tests that shake the order.
    """

    def __init__(self, schedule: Schedule, execute: Execute, inline: str = "compute", delay: Delay | None = None):
        self._execute = execute
        self._delay = delay
        self._error: BaseException | None = None
        self._closed = False
        self._first_step = 0
        self._spans: list[Span] = []
        self._lanes = _programs(schedule)
        self._inline = self._lanes.get(inline)
        self._place = _places(schedule, self._lanes)
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"lane-{name}", daemon=True)
            for name, lane in self._lanes.items()
            if lane is not self._inline
        ]
        self._usual_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_INTERVAL, self._usual_interval))
        for thread in self._threads:
            thread.start()

    def start(self, first_step: int) -> None:
        """Begin anew at ``first_step``; the lanes must be idle."""
        self._first_step = first_step
        for lane in self._lanes.values():
            with lane.changed:
                lane.done = lane.submitted = 0

    def run_step(self, step: int) -> None:
        """Hand ``step`` to every lane and run the inline lane's part of it here."""
        for lane in self._lanes.values():
            with lane.changed:
                lane.submitted += len(lane.program)
                if lane is not self._inline:
                    lane.steps.append(step)
                    lane.changed.notify_all()
        if self._inline is not None:
            self._run(self._inline, step)

    def wait(self, op: Ref) -> None:
        """Wait until ``op`` (absolute batch) has run; its step must have been handed over."""
        lane, offset, position = self._place[op.stage, op.micro]
        self._wait(lane, (op.batch - offset - self._first_step) * len(lane.program) + position + 1)

    def drain(self) -> None:
        """Wait until every lane has run all that was handed to it."""
        for lane in self._lanes.values():
            self._wait(lane, lane.submitted)

    def close(self) -> None:
        self._closed = True
        sys.setswitchinterval(self._usual_interval)
        for lane in self._lanes.values():
            with lane.changed:
                lane.changed.notify_all()
        # After an error a lane may be left inside a collective that no peer joins; it ends with the process.
        deadline = time.monotonic() + (0.5 if self._error else 5.0)
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def take_spans(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    def _serve(self, lane: _Lane) -> None:
        while True:
            with lane.changed:
                while not lane.steps:
                    if self._closed:
                        return
                    lane.changed.wait()
                step = lane.steps.popleft()
            try:
                self._run(lane, step)
            except LaneStopped:
                return
            except BaseException as error:
                self._fail(error)
                return

    def _run(self, lane: _Lane, step: int) -> None:
        since = step - self._first_step
        for ref, needs in lane.program:
            if self._error:
                raise LaneStopped("a lane has stopped") from self._error
            for other, shift, position in needs:
                self._wait(other, (since + shift) * len(other.program) + position + 1)
            named = ref._replace(batch=ref.batch + step)
            if self._delay:
                time.sleep(self._delay(named))
            begin = time.perf_counter_ns()
            try:
                self._execute(named)
            except BaseException as error:
                self._fail(error)
                raise
            self._spans.append(Span(*named, lane.name, begin, time.perf_counter_ns()))
            with lane.changed:
                lane.done += 1
                lane.changed.notify_all()

    def _wait(self, lane: _Lane, count: int) -> None:
        if lane.done >= count and not self._error:
            return
        with lane.changed:
            while lane.done < count and not self._error and not self._closed:
                lane.changed.wait()
        if self._error or self._closed:
            raise LaneStopped("a lane has stopped") from self._error

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        for lane in self._lanes.values():
            with lane.changed:
                lane.changed.notify_all()


class OneAtATime:
    """The same list run one operation at a time, in schedule order, on the caller's thread."""

    def __init__(self, schedule: Schedule, execute: Execute):
        self._ops = [(op.ref, op.lane) for op in schedule.ops]
        self._execute = execute
        self._spans: list[Span] = []

    def start(self, first_step: int) -> None:
        pass

    def wait(self, op: Ref) -> None:
        pass

    def run_step(self, step: int) -> None:
        for ref, lane in self._ops:
            named = ref._replace(batch=ref.batch + step)
            begin = time.perf_counter_ns()
            self._execute(named)
            self._spans.append(Span(*named, lane, begin, time.perf_counter_ns()))

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass

    def take_spans(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans


def _programs(schedule: Schedule) -> dict[str, _Lane]:
    """Per lane its operations in a step, with their waits: (lane, steps from this one, place in that lane's step)."""
    lanes = {name: _Lane(name) for name in schedule.lanes}
    place = _places(schedule, lanes)
    for op in schedule.ops:
        needs = []
        for ref in op.after:
            lane, offset, at = place[ref.stage, ref.micro]
            needs.append((lane, ref.batch - offset, at))
        lanes[op.lane].program.append((op.ref, needs))
    return lanes


def _places(schedule: Schedule, lanes: dict[str, _Lane]) -> dict[tuple[str, int], tuple[_Lane, int, int]]:
    """Where an operation stands: (lane, batch offset in the template, position in the lane's step)."""
    place = {}
    position = dict.fromkeys(lanes, 0)
    for op in schedule.ops:
        place[op.ref.stage, op.ref.micro] = (lanes[op.lane], op.ref.batch, position[op.lane])
        position[op.lane] += 1
    return place
