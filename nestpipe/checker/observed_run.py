"""Does a declared schedule allow an observed run? For pipelines that are not executed from a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from nestpipe.measurement.trace import Span
from nestpipe.schedule.operations import Op, Ref, Schedule

#: (stage, stage during which it may begin): DDP starts the AllReduce during backward, bucket by bucket.
INSIDE = (("A", "B"),)


def violations(
    spans: Sequence[Span], schedule: Schedule, sometimes: str = "", stopped: bool = False, clock_ns: int = 0
) -> list[str]:
    """Sentences on what ``schedule`` does not allow in one rank's ``spans``; empty if it allows the run.

    Every operation of every batch must have been seen on its declared lane. It must begin after the end of
    everything that it is declared to wait for, and after its predecessor on the lane began. A span may be a piece
    of an operation. Batches are counted from the first one seen.

    ``sometimes``: stages that a batch may lack (2D-SP's D, with an interval above 1). ``stopped``: the run stopped
    before its data ended, so steps after that of the last O may be incomplete. ``clock_ns``: the possible error of
    the times, in nanoseconds.
    """
    seen: dict[Ref, tuple[int, int]] = {}
    lanes: dict[Ref, str] = {}
    for s in spans:
        ref = Ref(s.stage, s.batch, s.micro)
        start, end = seen.get(ref, (s.start, s.end))
        seen[ref] = (min(start, s.start), max(end, s.end))
        lanes[ref] = s.lane
    batches = {ref.batch for ref in seen} or {0}
    first = min(batches)
    last_step = max((ref.batch for ref in seen if ref.stage == "O"), default=-1)
    texts = []
    last: dict[str, Op] = {}
    for op in (op.shifted(first) for op in schedule.unroll(max(batches) - first + 1)):
        if op.ref not in seen:
            in_time = not stopped or op.ref.batch - schedule.places[op.ref.in_step()].offset <= last_step
            if in_time and op.ref.stage not in sometimes:
                texts.append(f"{op.ref} is declared but was not seen")
            continue
        start, _ = seen[op.ref]
        if lanes[op.ref] != op.lane:
            texts.append(f"{op.ref} ran on lane {lanes[op.ref]}, but its declared lane is {op.lane}")
        for awaited in op.after:
            began, ended = seen.get(awaited, (start, start))
            done = began if (op.ref.stage, awaited.stage) in INSIDE else ended
            if done > start + clock_ns:
                texts.append(f"{op.ref} is declared to wait for {awaited}, but began before it ended")
        previous = last.get(op.lane)
        if previous is not None and seen[previous.ref][0] > start + clock_ns:
            texts.append(f"{op.ref} began before {previous.ref}, which comes before it on lane {op.lane}")
        last[op.lane] = op
    texts += [f"{ref} was seen but is not declared" for ref in seen if ref.in_step() not in schedule.places]
    return texts
