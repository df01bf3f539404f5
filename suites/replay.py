"""Steps that were measured earlier, played back to pytest-benchmark.

Its ``benchmark`` fixture serves one function per test, so it cannot interleave methods itself. They
are measured interleaved by a session fixture; each test then replays one method's steps, on a clock
that shows the time they took.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nestpipe.measurement.record import Record
from results.frames.labels import conditions_of, label_of, variant_of


class Replay:
    """``clock`` advances by the next of ``durations`` (seconds) with every ``step``."""

    def __init__(self) -> None:
        self._now = 0.0
        self._left: Iterator[float] = iter(())

    def load(self, durations: Sequence[float]) -> None:
        self._left = iter(durations)

    def clock(self) -> float:
        return self._now

    def step(self) -> None:
        self._now += next(self._left)


#: A benchmark's timer is named where the test is defined, so there is one for all; tests run one at a time.
replay = Replay()


def play(benchmark: Any, artefact: str, part: str, record: Record) -> None:
    """Replay ``record``'s steps into ``benchmark``, grouped by artefact and conditions."""
    durations = [ms / 1e3 for ms in record.metrics["step_ms"]]
    benchmark.group = f"{artefact}: {conditions_of(record)}"
    benchmark.extra_info.update(about([(part, record)]), method=record.method, row=label_of(variant_of(record)))
    replay.load(durations)
    benchmark.pedantic(replay.step, rounds=len(durations), iterations=1)


def about(records: Sequence[tuple[str, Record]]) -> dict[str, Any]:
    """``extra_info``: headline numbers of the first record, and all records whole, from which tables can be made."""
    first = records[0][1]
    median = {name: float(np.median(values)) for name, values in first.metrics.items() if len(values)}
    return {
        "kind": first.kind,
        "exposed_ratio": median.get("exposed_communication_ratio"),
        "qps": median.get("qps"),
        "paced": first.paced,
        "config": dict(first.config),
        "records": [[part, record.to_json()] for part, record in records],
    }
