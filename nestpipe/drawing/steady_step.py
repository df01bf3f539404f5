"""Cuts steps out of a timeline: a steady step of a schedule, or some steps of a real run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nestpipe.measurement.trace import Timeline
from nestpipe.schedule.operations import Op, Ref, Schedule
from nestpipe.schedule.stages import COMPUTE_LANE
from nestpipe.simulator.virtual_lanes import virtual_timeline


class StepSpan(NamedTuple):
    """An operation as drawn. ``batch`` is relative to the first step shown, ``start`` and ``end`` to its beginning."""

    stage: str
    batch: int
    micro: int
    lane: str
    start: float
    end: float

    @property
    def name(self) -> str:
        """The name relative to the first step shown: ``R+1``, ``E.2``."""
        return Ref(self.stage, self.batch, self.micro).relative()


@dataclass(frozen=True)
class Steps:
    """Consecutive steps, in the timeline's unit of time. Spans may begin before 0 and end after ``length``."""

    spans: tuple[StepSpan, ...]
    length: float


def steady_step(schedule: Schedule, duration: Callable[[Op], float]) -> Steps:
    """One step of ``schedule`` on virtual clocks, far from the first and the last step.

    ``duration``: gives the time of an operation, in any unit. Raises ValueError if no operation is on the compute
    lane, and for a cycle.
    """
    middle = steady_batch(schedule)
    ops = step_by_step(schedule).unroll(2 * middle)
    timeline = virtual_timeline(ops, np.array([[float(duration(op))] for op in ops]))
    found = cut_out(timeline, middle, middle)
    assert found is not None, "every batch of an unrolled schedule has an end"
    return found


def steady_batch(schedule: Schedule) -> int:
    """A batch by which the pipeline has filled and every ring has turned over."""
    return schedule.depth + max(schedule.rings.values()) + 3


def cut_out(timeline: Timeline, first: int, last: int, rank: int = 0) -> Steps | None:
    """What runs on ``rank`` from the end of step ``first`` - 1 to the end of step ``last``; None if either is missing.

    A step ends with the last operation of its batch on the compute lane.
    """
    start, end = timeline.start[:, rank], timeline.end[:, rank]
    ends: dict[int, float] = {}
    for i, (ref, lane) in enumerate(zip(timeline.refs, timeline.lanes, strict=True)):
        if lane == COMPUTE_LANE:
            ends[ref.batch] = max(float(end[i]), ends.get(ref.batch, -np.inf))
    if first - 1 not in ends or last not in ends:
        return None
    low, high = ends[first - 1], ends[last]
    spans = tuple(
        StepSpan(ref.stage, ref.batch - first, ref.micro, lane, float(start[i]) - low, float(end[i]) - low)
        for i, (ref, lane) in enumerate(zip(timeline.refs, timeline.lanes, strict=True))
        if end[i] > low and start[i] < high
    )
    return Steps(spans, high - low)


def step_by_step(schedule: Schedule) -> Schedule:
    """``schedule`` as the engine runs it: the lanes get a step once the compute lane has finished the step before.

    Raises ValueError if no operation is on the compute lane.
    """
    last = next((op.ref for op in reversed(schedule.ops) if op.lane == COMPUTE_LANE), None)
    if last is None:
        raise ValueError(
            f"{schedule.name}: no operation is on the lane '{COMPUTE_LANE}', so a step has no end; add one"
        )
    earlier = last._replace(batch=last.batch - 1)
    return replace(schedule, ops=tuple(replace(op, after=(*op.after, earlier)) for op in schedule.ops))
