"""The walk back along the critical path: what an idle interval of the compute lane was spent waiting for.

    all2all      |   G.4========|E+1.1===|
    compute   ...B.4|            .........|F+1.1
                    low      walk <------ now

The interval ends when the operation after it can start. Of the operations that it waited for, the one that ended
last explains the stretch before. Going back in time, that stretch is first the part in which the cause was running.
If the cause is a collective, the time that it waited for the last rank to enter comes next: the skew. Then the walk
continues from the beginning of the cause, until it reaches the beginning of the interval.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nestpipe.measurement.trace import Timeline


@dataclass(frozen=True)
class IdleIntervals:
    """Idle intervals, one per entry, each on one rank; int64 and float64 [intervals].

    ``low`` and ``now``: beginning and end in seconds. ``operation``: index of the operation that ends the interval.
    ``rank``: index in the timeline.
    """

    rank: np.ndarray
    low: np.ndarray
    now: np.ndarray
    operation: np.ndarray


@dataclass(frozen=True)
class Stretch:
    """One step back in every interval that the walk has not finished yet; float64 seconds, int64 indices.

    ``interval``: index in ``IdleIntervals``. ``cause``: the operation that explains the stretch. Going back in time,
    the stretch is ``unexplained`` while nothing known was running, then ``running`` while the cause was, then
    ``skew`` while the cause waited for the last rank to enter.
    """

    interval: np.ndarray
    cause: np.ndarray
    unexplained: np.ndarray
    running: np.ndarray
    skew: np.ndarray


def walk_back(timeline: Timeline, idle: IdleIntervals) -> Iterator[Stretch]:
    """Explain all intervals at once. Each stretch goes one operation further back."""
    interval = np.arange(len(idle.rank))
    rank, low, now, current = idle.rank, idle.low, idle.now, idle.operation
    while len(now):
        waited = timeline.waited_for[current]  # [intervals, most]
        ended = np.where(waited >= 0, timeline.end[waited, rank[:, None]], -np.inf)
        choice = ended.argmax(axis=1)
        cause = waited[np.arange(len(choice)), choice]
        # If the operation is not known to have waited for anything, the rest of the interval cannot be explained.
        known = cause >= 0
        until = np.clip(ended[np.arange(len(choice)), choice], low, now)
        ready = np.clip(np.where(known, timeline.ready[cause, rank], -np.inf), low, until)
        begin = np.clip(np.where(known, timeline.start[cause, rank], -np.inf), low, ready)
        yield Stretch(interval, cause, now - until, until - ready, ready - begin)
        # A wait that explains nothing (an operation of zero length) must not stall the walk.
        unfinished = known & ((begin < now) | (cause != current)) & (begin > low)
        interval, rank, low = interval[unfinished], rank[unfinished], low[unfinished]
        now, current = begin[unfinished], cause[unfinished]
