"""Virtual-time lanes: when each operation of a schedule would run, given how long each takes.

The order of operations is static, so a run is one pass over the unrolled schedule. An operation
starts when its lane is free and everything that it waits for is done. A collective proceeds when
the last member of its group has entered. All workers are computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nestpipe.measurement.trace import Timeline, waits
from nestpipe.schedule.operations import Op, Ref
from nestpipe.schedule.order import linear_extension


class Durations(Protocol):
    """Seconds by operation: an array [ops, workers], or anything that yields row i, float64 [workers], when asked."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, i: int, /) -> np.ndarray: ...


@dataclass(frozen=True)
class LanePlan:
    """An unrolled schedule, prepared for being timed many times.

    ``order``: indices of the operations in a legal order; ``needs``: per operation, indices of what
    must be done before it; ``before``: the same as a table, see ``trace.Timeline``.
    """

    ops: tuple[Op, ...]
    order: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    before: np.ndarray

    @property
    def refs(self) -> tuple[Ref, ...]:
        return tuple(op.ref for op in self.ops)


def lane_plan(ops: Sequence[Op]) -> LanePlan:
    """The plan of ``ops`` (unrolled, in schedule order). Raises ValueError if some of them can never start."""
    before = waits(ops)
    position = {op.ref: i for i, op in enumerate(ops)}
    order = tuple(position[op.ref] for op in linear_extension(ops))
    if len(order) != len(ops):
        stuck = next(op.ref for i, op in enumerate(ops) if i not in set(order))
        raise ValueError(f"the schedule has a cycle: {stuck} can never start")
    needs = tuple(tuple(int(j) for j in row if j >= 0) for row in before)
    return LanePlan(tuple(ops), order, needs, before)


def virtual_timeline(ops: Sequence[Op], duration: Durations, group_size: int | None = None) -> Timeline:
    """Run ``ops`` (unrolled) on virtual clocks.

    ``duration``: seconds, float64 [ops, workers]; a collective's count from when all members have entered.
    ``group_size``: number of consecutive workers that an All2All or key exchange joins (default: all);
    AllReduce joins all. Raises ValueError if the workers cannot be split into such groups.
    """
    return run_lanes(lane_plan(ops), duration, group_size)


def run_lanes(
    plan: LanePlan, duration: Durations, group_size: int | None = None, independent: bool = False
) -> Timeline:
    """``virtual_timeline`` of a plan. Replica synchronisation joins the workers at the same place in every group.

    ``independent``: no collective joins any workers. Each column is then its own cluster with one representative
    worker, so many configurations run in one pass.
    """
    workers = duration.shape[1]
    joined = 1 if independent else group_size or workers
    if workers % joined:
        raise ValueError(f"{workers} workers cannot be split into groups of {joined}")
    sizes = {None: 1, "allreduce": 1 if independent else workers}
    start, ready, end = (np.empty((len(plan.ops), workers)) for _ in range(3))
    groups = [sizes.get(op.stage.group, joined) for op in plan.ops]
    for i in plan.order:
        begin = start[i]
        needs = plan.needs[i]
        if not needs:
            begin[:] = 0.0
        elif len(needs) == 1:
            begin[:] = end[needs[0]]
        else:
            np.maximum(end[needs[0]], end[needs[1]], out=begin)
            for j in needs[2:]:
                np.maximum(begin, end[j], out=begin)
        replicas = plan.ops[i].stage.group == "replicas" and not independent
        if groups[i] == 1 and not replicas:
            ready[i] = begin
        elif replicas:
            ready[i] = np.tile(begin.reshape(-1, groups[i]).max(axis=0), workers // groups[i])
        elif groups[i] == workers:
            ready[i] = begin.max()
        else:
            ready[i] = np.repeat(begin.reshape(-1, groups[i]).max(axis=1), groups[i])
        np.add(ready[i], duration[i], out=end[i])
    return Timeline(plan.refs, tuple(op.lane for op in plan.ops), start, ready, end, plan.before)
