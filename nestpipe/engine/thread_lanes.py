"""Lanes that are threads of this process."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nestpipe.engine.lanes import Execute, LaneStopped
from nestpipe.measurement.trace import Span
from nestpipe.schedule.operations import Ref, Schedule
from nestpipe.schedule.stages import COMPUTE_LANE

#: Seconds that a lane may hold the interpreter while another waits for it. With Python's 5 ms, one lane's
#: small operations could wait for a whole forward pass on another.
_SWITCH_INTERVAL = 5e-5

Delay = Callable[[Ref], float]


@dataclass
class _Lane:
    """``done``: operations finished since ``start``. Other lanes wait for it to change, under ``changed``."""

    name: str
    program: list[tuple[Ref, list[tuple[_Lane, int, int]]]] = field(default_factory=list)
    done: int = 0
    submitted: int = 0
    steps: deque[int] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)


class ThreadLanes:
    """A thread per lane. The compute lane, if there is one, runs on the thread that calls ``run_step``.

    ``delay``: gives the seconds to sleep before an operation, for tests that perturb the order.
    """

    def __init__(self, schedule: Schedule, execute: Execute, delay: Delay | None = None):
        self._execute = execute
        self._delay = delay
        self._error: BaseException | None = None
        self._closed = False
        self._first_step = 0
        self._spans: list[Span] = []
        self._lanes = _programs(schedule)
        self._compute = self._lanes.get(COMPUTE_LANE)
        self._places = schedule.places
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"lane-{name}", daemon=True)
            for name, lane in self._lanes.items()
            if lane is not self._compute
        ]
        self._usual_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_INTERVAL, self._usual_interval))
        for thread in self._threads:
            thread.start()

    def start(self, first_step: int) -> None:
        self._first_step = first_step
        for lane in self._lanes.values():
            with lane.changed:
                lane.done = lane.submitted = 0

    def run_step(self, step: int) -> None:
        for lane in self._lanes.values():
            with lane.changed:
                lane.submitted += len(lane.program)
                if lane is not self._compute:
                    lane.steps.append(step)
                    lane.changed.notify_all()
        if self._compute is not None:
            self._run(self._compute, step)

    def wait(self, ref: Ref) -> None:
        place = self._places[ref.in_step()]
        lane = self._lanes[place.lane]
        self._wait(lane, (ref.batch - place.offset - self._first_step) * len(lane.program) + place.on_lane + 1)

    def drain(self, seconds: float | None = None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        for lane in self._lanes.values():
            self._wait(lane, lane.submitted, deadline)

    def stop(self, error: BaseException) -> None:
        self._fail(error)

    def close(self) -> None:
        self._closed = True
        sys.setswitchinterval(self._usual_interval)
        for lane in self._lanes.values():
            with lane.changed:
                lane.changed.notify_all()
        # After an error a lane may be stuck in a collective that no peer joins. It ends with the process.
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

    def _wait(self, lane: _Lane, count: int, deadline: float | None = None) -> None:
        if lane.done >= count and not self._error:
            return
        with lane.changed:
            while lane.done < count and not self._error and not self._closed:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return
                lane.changed.wait(left)
        if self._error or self._closed:
            raise LaneStopped("a lane has stopped") from self._error

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        for lane in self._lanes.values():
            with lane.changed:
                lane.changed.notify_all()


def _programs(schedule: Schedule) -> dict[str, _Lane]:
    """By lane, its operations in a step with their waits: (lane, steps from this one, position in that lane's step)."""
    lanes = {name: _Lane(name) for name in schedule.lanes}
    for op in schedule.ops:
        needs = []
        for ref in op.after:
            place = schedule.places[ref.in_step()]
            needs.append((lanes[place.lane], ref.batch - place.offset, place.on_lane))
        lanes[op.lane].program.append((op.ref, needs))
    return lanes
