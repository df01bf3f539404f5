"""Spans: what ran when, on which lane of which rank."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """One operation of one rank. Times are ``time.perf_counter_ns`` of the rank's own clock.

    ``stage``: letter of the stage (see ``schedule.Stage``); ``batch``: absolute batch number;
    ``micro``: 1-based micro-batch, 0 for an operation on the whole batch.
    """

    stage: str
    batch: int
    micro: int
    lane: str
    start: int
    end: int
