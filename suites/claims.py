"""What each feature must do to a run, in terms that hold on a busy machine. Each raises AssertionError if it is off.

Times are compared within one record (hidden against total), never between two runs.
"""

from __future__ import annotations

import numpy as np

from nestpipe.measurement.record import Record


def _total(record: Record, name: str) -> float:
    return float(np.sum(record.metrics[name]))


def hides_lookups(record: Record) -> None:
    """Dual-buffer pipelining: most of the lookup is off the critical path."""
    exposed, total = _total(record, "exposed_lookup_ms"), _total(record, "lookup_ms")
    assert exposed < 0.5 * total, f"{record.method}: {exposed:.1f} of {total:.1f} ms of lookup are exposed"


def hides_communication(record: Record) -> None:
    """Frozen-window pipelining: much of the All2All is off the critical path (an eighth to a third is left on it)."""
    exposed, total = _total(record, "exposed_communication_ms"), _total(record, "communication_ms")
    assert exposed < 0.6 * total, f"{record.method}: {exposed:.1f} of {total:.1f} ms of communication are exposed"


def hides_nothing(record: Record) -> None:
    """The baseline: all of its communication and lookup is on the critical path."""
    for name in ("lookup", "communication"):
        exposed, total = _total(record, f"exposed_{name}_ms"), _total(record, f"{name}_ms")
        assert exposed > 0.8 * total, f"{record.method}: only {exposed:.1f} of {total:.1f} ms of {name} are exposed"


def parts_sum_to_step(record: Record) -> None:
    """The parts of a step are disjoint and add up to the step."""
    names = ("dense_ms", "update_ms", "exposed_input_ms", "exposed_lookup_ms", "exposed_communication_ms")
    parts = sum(np.asarray(record.metrics[n]) for n in (*names, "exposed_dense_sync_ms", "skew_ms", "other_ms"))
    np.testing.assert_allclose(parts, record.metrics["step_ms"], rtol=1e-6, atol=1e-6)


def sends_less(record: Record, other: Record) -> None:
    """Fewer embedding bytes are sent: clustering, index deduplication, replica groups."""
    mine, theirs = _total(record, "embedding_bytes"), _total(other, "embedding_bytes")
    assert mine < theirs, f"{record.method} sends {mine:.0f} bytes, {other.method} {theirs:.0f}"


def trains_alike(record: Record, other: Record, tolerance: float = 0.0) -> None:
    """Synchronous training: losses equal those of ``other``, bit for bit without ``tolerance``."""
    gap = float(np.max(np.abs(np.subtract(record.losses, other.losses))))
    moved = float(np.ptp(other.losses))
    assert moved > 0, f"{other.method}: the loss does not move, so equal losses show nothing"
    assert gap <= tolerance, f"{record.method}: losses differ from {other.method}'s by {gap:.3g}"


def scales(records: dict[tuple[str, int], Record], method: str, few: int, many: int) -> float:
    """Scaling efficiency of simulated records: QPS per worker on ``many`` workers over that on ``few``."""
    qps = {n: float(np.mean(records[method, n].metrics["qps"])) / n for n in (few, many)}
    return qps[many] / qps[few]
