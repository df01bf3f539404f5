"""Is an observed run one that a declared schedule allows? For pipelines that are not executed from a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from nestpipe.measurement.trace import Span
from nestpipe.schedule.operations import Op, Ref, Schedule

#: (stage, stage inside which it may begin): DDP launches the AllReduce in mid-backward, bucket by bucket.
INSIDE = (("A", "B"),)


def violations(spans: Sequence[Span], schedule: Schedule, sometimes: str = "") -> list[str]:
    """Sentences on what one rank's ``spans`` show and ``schedule`` does not allow; empty if it allows the run.

    Every operation of every batch must have been seen, on its declared lane, must begin after the end of what it
    is declared to wait for, and must begin after its predecessor on the lane began. A span may be a piece of an
    operation. ``sometimes``: stages that a batch may lack (2D-SP's D, with an interval above 1).
    """
    seen: dict[Ref, tuple[int, int]] = {}
    lanes: dict[Ref, str] = {}
    for s in spans:
        ref = Ref(s.stage, s.batch, s.micro)
        start, end = seen.get(ref, (s.start, s.end))
        seen[ref] = (min(start, s.start), max(end, s.end))
        lanes[ref] = s.lane
    batches = 1 + max((ref.batch for ref in seen), default=-1)
    texts = []
    last: dict[str, Op] = {}
    for op in schedule.unroll(batches):
        if op.ref not in seen:
            if op.ref.stage not in sometimes:
                texts.append(f"{op.ref} is declared and was not seen")
            continue
        start, _ = seen[op.ref]
        if lanes[op.ref] != op.lane:
            texts.append(f"{op.ref} ran on lane {lanes[op.ref]}, declared is {op.lane}")
        for awaited in op.after:
            began, ended = seen.get(awaited, (start, start))
            done = began if (op.ref.stage, awaited.stage) in INSIDE else ended
            if done > start:
                texts.append(f"{op.ref} began before {awaited} had ended, which it is declared to wait for")
        previous = last.get(op.lane)
        if previous is not None and seen[previous.ref][0] > start:
            texts.append(f"{op.ref} began before {previous.ref}, which comes before it on lane {op.lane}")
        last[op.lane] = op
    texts += [f"{ref} was seen and is not declared" for ref in seen if ref.in_step() not in schedule.places]
    return texts
