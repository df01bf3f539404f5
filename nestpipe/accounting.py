"""Exposed time, the one definition: timelines in, step latency and its parts out.

Step t runs from the end of step t - 1 to the end of its last compute operation. Inside it the
compute lane is busy (dense: F and B; update: U, S and O) or idle. Each idle interval ends because
some operation could start at last: walk back from it along the critical path, through whatever
ended last of what each operation waited for, and charge each stretch to the operation that was
running on it; stretches when none was running are ``other``. Waiting inside a collective for the
last rank to enter is ``skew``. The parts are disjoint and sum to the step.

Real runs and simulations go through here alike, all ranks at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nestpipe.schedule import STAGES
from nestpipe.trace import Timeline

#: Where an idle stretch of the compute lane can go, beside skew and other.
EXPOSED = ("input", "lookup", "communication", "dense_sync")
_PARTS = (*EXPOSED, "skew", "other")
_CATEGORIES = ("dense", "update", *_PARTS)


@dataclass(frozen=True)
class StepTimes:
    """Per-step times in milliseconds, float64 [steps, ranks], by name.

    ``step``; its disjoint parts ``dense``, ``update``, ``exposed_input``, ``exposed_lookup``,
    ``exposed_communication``, ``exposed_dense_sync``, ``skew``, ``other``; and the own totals
    without skew ``input``, ``lookup``, ``communication``, ``dense_sync`` (of the batch, hidden or not).
    """

    steps: tuple[int, ...]
    ms: Mapping[str, np.ndarray]

    def mean(self, name: str) -> np.ndarray:
        """[steps], mean over ranks."""
        return self.ms[name].mean(axis=1)


def step_times(timeline: Timeline, inline: str = "compute") -> StepTimes:
    """Account every step that ``timeline`` shows from end to end. The first one has no beginning and is left out."""
    category = np.array([_CATEGORIES.index(STAGES[ref.stage].category) for ref in timeline.refs], dtype=np.int64)
    batch = np.array([ref.batch for ref in timeline.refs], dtype=np.int64)
    on_lane = np.flatnonzero([lane == inline for lane in timeline.lanes])
    # Compute operations in the order of the lane; a step ends with the last one of its batch.
    last = {int(b): i for i, b in enumerate(batch[on_lane])}
    complete = sorted(b for b in last if b - 1 in last)
    if not complete:
        return StepTimes((), {name: np.zeros((0, timeline.ranks)) for name in _names()})
    bounds = np.array([last[complete[0] - 1], *(last[b] for b in complete)])
    parts = np.zeros((len(on_lane), len(_CATEGORIES), timeline.ranks))
    duration = timeline.end[on_lane] - timeline.start[on_lane]
    parts[np.arange(len(on_lane)), category[on_lane]] += duration
    parts[1:] += _idle_parts(timeline, category, on_lane)
    sums = parts.cumsum(axis=0)[bounds]
    per_step = (sums[1:] - sums[:-1]) * 1e3
    ends = timeline.end[on_lane][bounds]
    ms = {"step": (ends[1:] - ends[:-1]) * 1e3, "dense": per_step[:, 0], "update": per_step[:, 1]}
    for name in _PARTS:
        ms[f"exposed_{name}" if name in EXPOSED else name] = per_step[:, _CATEGORIES.index(name)]
    ms.update(_totals(timeline, category, batch, complete))
    return StepTimes(tuple(complete), ms)


def joined(ranks: Sequence[StepTimes]) -> StepTimes:
    """Several single-rank accounts as one; steps that not every rank has are left out."""
    steps = sorted(set.intersection(*(set(r.steps) for r in ranks)))
    pick = [[r.steps.index(step) for step in steps] for r in ranks]
    ms = {name: np.concatenate([r.ms[name][p] for r, p in zip(ranks, pick, strict=True)], axis=1) for name in _names()}
    return StepTimes(tuple(steps), ms)


def _names() -> list[str]:
    return ["step", "dense", "update", *(f"exposed_{name}" for name in EXPOSED), "skew", "other", *EXPOSED]


def _idle_parts(timeline: Timeline, category: np.ndarray, on_lane: np.ndarray) -> np.ndarray:
    """[compute ops - 1, categories, ranks]: what the idle interval before each compute operation is charged to, seconds."""
    ranks = np.arange(timeline.ranks)[None, :]
    low = timeline.end[on_lane[:-1]]
    now = np.maximum(timeline.start[on_lane[1:]], low)
    current = np.repeat(on_lane[1:, None], timeline.ranks, axis=1)
    charged = np.zeros((len(on_lane) - 1, len(_CATEGORIES), timeline.ranks))
    other, skew = _CATEGORIES.index("other"), _CATEGORIES.index("skew")
    rows = np.arange(len(on_lane) - 1)[:, None]
    while (active := now > low).any():
        waited = timeline.before[current]  # [intervals, ranks, most]
        ended = np.where(waited >= 0, timeline.end[waited, ranks[..., None]], -np.inf)
        choice = ended.argmax(axis=-1)
        previous = np.take_along_axis(waited, choice[..., None], axis=-1)[..., 0]
        # Nothing known to wait for: the rest of the interval cannot be explained.
        known = np.where(previous >= 0, np.take_along_axis(ended, choice[..., None], axis=-1)[..., 0], -np.inf)
        until = np.clip(known, low, now)
        charged[:, other] += np.where(active, now - until, 0.0)
        ready = np.clip(np.where(previous >= 0, timeline.ready[previous, ranks], -np.inf), low, until)
        begin = np.clip(np.where(previous >= 0, timeline.start[previous, ranks], -np.inf), low, ready)
        np.add.at(charged, (rows, category[previous], ranks), np.where(active, until - ready, 0.0))
        charged[:, skew] += np.where(active, ready - begin, 0.0)
        # A wait that explains nothing (an operation of no length) must not stall the walk.
        moved = (begin < now) | (previous != current)
        now = np.where(active & moved & (previous >= 0), begin, low)
        current = previous
    return charged


def _totals(timeline: Timeline, category: np.ndarray, batch: np.ndarray, steps: Sequence[int]) -> dict[str, np.ndarray]:
    own = (timeline.end - timeline.ready) * 1e3
    index = {b: i for i, b in enumerate(steps)}
    row = np.array([index.get(int(b), -1) for b in batch])
    totals = {}
    for name in EXPOSED:
        total = np.zeros((len(steps), timeline.ranks))
        mine = (category == _CATEGORIES.index(name)) & (row >= 0)
        np.add.at(total, row[mine], own[mine])
        totals[name] = total
    return totals
