"""The walk back along the critical path: why an interval in which the compute lane was idle was as long as it was.

    all2all      |   G.4========|E+1.1===|
    compute   ...B.4|            .........|F+1.1
                    low      walk <------ now

The interval ends because the operation after it could start at last. Of what that operation waited for, the one
that ended last explains the stretch before: first, if it is a collective, the part in which all had entered, then
the skew until the last rank entered. Then the walk continues from where it began, until the interval's beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nestpipe.measurement.trace import Timeline


@dataclass(frozen=True)
class IdleIntervals:
    """Idle intervals, one per entry, each on one rank; int64 and float64 [intervals].

    ``low`` and ``now``: beginning and end in seconds; ``operation``: index of the one that the interval ends with;
    ``rank``: index in the timeline.
    """

    rank: np.ndarray
    low: np.ndarray
    now: np.ndarray
    operation: np.ndarray


@dataclass(frozen=True)
class Stretch:
    """One step back of every interval that the walk has not finished yet; float64 seconds, int64 indices.

    ``interval``: index in ``IdleIntervals``; ``cause``: the operation that explains the stretch. Back from where the
    walk was: ``unexplained``, in which nothing known was running; ``running``, in which the cause was; ``skew``, in
    which it waited for the last rank to enter.
    """

    interval: np.ndarray
    cause: np.ndarray
    unexplained: np.ndarray
    running: np.ndarray
    skew: np.ndarray


def walk_back(timeline: Timeline, idle: IdleIntervals) -> Iterator[Stretch]:
    """Explain all intervals at once, one operation further back with each stretch."""
    interval = np.arange(len(idle.rank))
    rank, low, now, current = idle.rank, idle.low, idle.now, idle.operation
    while len(now):
        waited = timeline.waited_for[current]  # [intervals, most]
        ended = np.where(waited >= 0, timeline.end[waited, rank[:, None]], -np.inf)
        choice = ended.argmax(axis=1)
        cause = waited[np.arange(len(choice)), choice]
        # If nothing is known that was waited for, the rest of the interval cannot be explained.
        known = cause >= 0
        until = np.clip(ended[np.arange(len(choice)), choice], low, now)
        ready = np.clip(np.where(known, timeline.ready[cause, rank], -np.inf), low, until)
        begin = np.clip(np.where(known, timeline.start[cause, rank], -np.inf), low, ready)
        yield Stretch(interval, cause, now - until, until - ready, ready - begin)
        # A wait that explains nothing (an operation of no length) must not stall the walk.
        unfinished = known & ((begin < now) | (cause != current)) & (begin > low)
        interval, rank, low = interval[unfinished], rank[unfinished], low[unfinished]
        now, current = begin[unfinished], cause[unfinished]
