"""The only definition of exposed time: from timelines to step latency and its parts.

Step t runs from the end of step t - 1 to the end of its last compute operation. Inside it the compute
lane is busy (dense: F and B; update: U, S and O) or idle. Each idle interval ends when some operation
can start. From there the walk goes back along the critical path (``critical_path``) and charges each
stretch to the operation that was running. Stretches without a running operation are ``other``. Time
spent inside a collective waiting for the last rank to enter is ``skew``. The parts are disjoint and
sum to the step.

Real runs and simulations use the same code, for all ranks at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nestpipe.measurement.critical_path import IdleIntervals, walk_back
from nestpipe.measurement.trace import Timeline
from nestpipe.schedule.stages import CATEGORIES, COMPUTE_LANE, STAGES

#: What an idle stretch of the compute lane can be charged to, apart from skew and other.
EXPOSED = tuple(name for name in CATEGORIES if name not in ("dense", "update"))
_CATEGORIES = (*CATEGORIES, "skew", "other")
_RANKS_AT_A_TIME = 128


@dataclass(frozen=True)
class StepTimes:
    """Per-step times in milliseconds, float64 [steps, ranks], by name.

    The names are ``step``; its disjoint parts ``dense``, ``update``, ``exposed_input``, ``exposed_lookup``,
    ``exposed_communication``, ``exposed_dense_sync``, ``skew`` and ``other``; and ``input``, ``lookup``,
    ``communication`` and ``dense_sync``. The last four are totals of the batch's own operations, hidden or not,
    without skew.
    """

    steps: tuple[int, ...]
    ms: Mapping[str, np.ndarray]

    def mean(self, name: str) -> np.ndarray:
        """float64 [steps]: the mean over ranks."""
        return self.ms[name].mean(axis=1)


def step_times(timeline: Timeline) -> StepTimes:
    """Times of every step that ``timeline`` shows from end to end. The first step has no beginning and is left out."""
    category = np.array([_CATEGORIES.index(STAGES[ref.stage].category) for ref in timeline.refs], dtype=np.int64)
    batch = np.array([ref.batch for ref in timeline.refs], dtype=np.int64)
    on_lane = np.flatnonzero([lane == COMPUTE_LANE for lane in timeline.lanes])
    # Compute operations in the order of the lane; a step ends with the last one of its batch. When a run stops,
    # S may have prepared batches that are never trained. Those are not steps.
    trained = set(batch[on_lane[category[on_lane] == _CATEGORIES.index("dense")]].tolist())
    last = {int(b): i for i, b in enumerate(batch[on_lane]) if int(b) in trained}
    complete = sorted(b for b in last if b - 1 in last)
    if not complete:
        return StepTimes((), {name: np.zeros((0, timeline.ranks)) for name in _names()})
    bounds = np.array([last[complete[0] - 1], *(last[b] for b in complete)])
    ends = timeline.end[on_lane[bounds]]
    ms = {name: np.empty((len(complete), timeline.ranks)) for name in _names()}
    ms["step"] = (ends[1:] - ends[:-1]) * 1e3
    # A few ranks at a time, so that the walk's tables stay small in a cluster of any size.
    for low in range(0, timeline.ranks, _RANKS_AT_A_TIME):
        ranks = slice(low, low + _RANKS_AT_A_TIME)
        parts = _parts(timeline, category, on_lane, bounds, np.arange(*ranks.indices(timeline.ranks)))
        for i, name in enumerate(_CATEGORIES):
            ms[f"exposed_{name}" if name in EXPOSED else name][:, ranks] = parts[:, i]
        for name, total in _totals(timeline, category, batch, complete, ranks).items():
            ms[name][:, ranks] = total
    return StepTimes(tuple(complete), ms)


def joined(ranks: Sequence[StepTimes]) -> StepTimes:
    """Several single-rank accounts as one. Steps that some rank lacks are left out."""
    steps = sorted(set.intersection(*(set(r.steps) for r in ranks)))
    pick = [[r.steps.index(step) for step in steps] for r in ranks]
    ms = {name: np.concatenate([r.ms[name][p] for r, p in zip(ranks, pick, strict=True)], axis=1) for name in _names()}
    return StepTimes(tuple(steps), ms)


def _names() -> list[str]:
    return ["step", "dense", "update", *(f"exposed_{name}" for name in EXPOSED), "skew", "other", *EXPOSED]


def _parts(
    timeline: Timeline, category: np.ndarray, on_lane: np.ndarray, bounds: np.ndarray, ranks: np.ndarray
) -> np.ndarray:
    """Milliseconds [steps, categories, ranks]: how the time of each step divides up on ``ranks``.

    ``on_lane``: indices of the compute lane's operations, in its order. ``bounds``: places in ``on_lane`` of the
    operations that end a step. A step is the operations after one bound up to and including the next, each with the
    idle interval before it::

        on_lane:  | F B U O | F B U O | F B U O |
        bounds:           ^         ^         ^      two steps, of four operations each
    """
    place = np.arange(bounds[0] + 1, bounds[-1] + 1)
    step = np.searchsorted(bounds, place) - 1
    operation = on_lane[place]
    parts = np.zeros((len(bounds) - 1, len(_CATEGORIES), len(ranks)))
    start, end = timeline.start[:, ranks], timeline.end[:, ranks]
    busy = end[operation] - start[operation]
    for name in ("dense", "update"):
        mine = category[operation] == _CATEGORIES.index(name)
        if mine.any():
            np.add.at(parts[:, _CATEGORIES.index(name)], step[mine], busy[mine])
    idle_since = end[on_lane[place - 1]]
    idle, rank = np.nonzero(start[operation] > idle_since)
    intervals = IdleIntervals(ranks[rank], idle_since[idle, rank], start[operation[idle], rank], operation[idle])
    skew, other = _CATEGORIES.index("skew"), _CATEGORIES.index("other")
    for stretch in walk_back(timeline, intervals):
        of_step, on_rank = step[idle[stretch.interval]], rank[stretch.interval]
        _charge(parts, of_step, other, on_rank, stretch.unexplained)
        _charge(parts, of_step, category[stretch.cause], on_rank, stretch.running)
        _charge(parts, of_step, skew, on_rank, stretch.skew)
    return parts * 1e3


def _charge(
    parts: np.ndarray, step: np.ndarray, category: int | np.ndarray, rank: np.ndarray, seconds: np.ndarray
) -> None:
    at: Any = (step, category, rank)
    np.add.at(parts, at, seconds)


def _totals(
    timeline: Timeline, category: np.ndarray, batch: np.ndarray, steps: Sequence[int], ranks: slice
) -> dict[str, np.ndarray]:
    row = np.searchsorted(steps, batch)
    inside = np.isin(batch, steps)
    totals = {}
    for name in EXPOSED:
        total = np.zeros((len(steps), len(range(*ranks.indices(timeline.ranks)))))
        mine = np.flatnonzero((category == _CATEGORIES.index(name)) & inside)
        np.add.at(total, row[mine], (timeline.end[mine, ranks] - timeline.ready[mine, ranks]) * 1e3)
        totals[name] = total
    return totals
