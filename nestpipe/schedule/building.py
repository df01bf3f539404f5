"""Builds schedules: an operation from its text, a schedule from its operations, and changes to a whole schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from nestpipe.schedule.operations import Op, Ref, Schedule, beyond_limits
from nestpipe.schedule.order import with_derived_edges
from nestpipe.schedule.stages import BATCH_RINGS, MICRO_RINGS, STAGES


def op(text: str, after: str = "", lane: str | None = None, marks: Iterable[str] = (), **access: str) -> Op:
    """``op("R+1", after="K+1 W-1")``. Lane, reads and writes default to those of the stage."""
    ref = parse_ref(text)
    stage = STAGES[ref.stage]
    reads = tuple(access["reads"].split()) if "reads" in access else stage.reads
    writes = tuple(access["writes"].split()) if "writes" in access else stage.writes
    return Op(ref, lane or stage.lane, tuple(map(parse_ref, after.split())), reads, writes, tuple(marks))


def parse_ref(text: str) -> Ref:
    """Parse ``R+1``, ``E.3``, ``E+1.3``, ``E12.3``. Raises ValueError naming the text."""
    head, _, micro = text.partition(".")
    try:
        ref = Ref(head[:1], int(head[1:] or 0), int(micro) if micro else 0)
    except ValueError:
        raise ValueError(
            f"'{text}' is not an operation: expected a stage letter, an offset and a micro-batch, as in E+1.3"
        ) from None
    if ref.stage not in STAGES:
        raise ValueError(f"'{text}': unknown stage '{ref.stage}', one of {' '.join(STAGES)}")
    if STAGES[ref.stage].per_micro_batch != (ref.micro > 0):
        need = "needs a micro-batch, as in E.1" if STAGES[ref.stage].per_micro_batch else "has no micro-batch"
        raise ValueError(f"'{text}': stage {ref.stage} ({STAGES[ref.stage].title}) {need}")
    return ref


def schedule(name: str, micro_batches: int, ops: Sequence[Op], derive: bool = True, **rings: int) -> Schedule:
    """The schedule of ``ops``. Unless ``derive`` is off, missing edges are derived from their reads and writes.

    ``rings``: sizes of rings that differ from the default. Raises ValueError if there are no micro-batches, or
    if a ring or the span of the offsets is beyond what the checker can follow.
    """
    if micro_batches < 1:
        raise ValueError(f"schedule {name}: micro_batches is {micro_batches}, must be at least 1")
    result = Schedule(name, micro_batches, tuple(ops), {**BATCH_RINGS, **MICRO_RINGS, **rings})
    if text := beyond_limits(result):
        raise ValueError(f"schedule {name}: {text}")
    return with_derived_edges(result) if derive else result


def folded(schedule: Schedule, into: Mapping[str, str]) -> Schedule:
    """The schedule with the operations of some lanes moved to other lanes, in schedule order.

    This pays if a lane has nothing to wait for, such as All2All on one rank: it would only cost its hand-offs.
    """
    return replace(schedule, ops=tuple(replace(o, lane=into.get(o.lane, o.lane)) for o in schedule.ops))


def marked(schedule: Schedule, stages: str, mark: str) -> Schedule:
    """The schedule with ``mark`` added to every operation of ``stages``, a string of letters."""
    return replace(
        schedule,
        ops=tuple(replace(o, marks=(*o.marks, mark)) if o.ref.stage in stages else o for o in schedule.ops),
    )


def counted(schedule: Schedule) -> Schedule:
    """The schedule for a model that divides by a count: U and O wait for A, which sums the count over ranks.

    Raises ValueError for a schedule in which U or O of a batch comes before its A.
    """
    access = {"A": ((), ("loss_count",)), "U": (("loss_count",), ()), "O": (("loss_count",), ())}
    ops = []
    reduced: set[int] = set()
    for o in schedule.ops:
        reads, writes = access.get(o.ref.stage, ((), ()))
        if o.ref.stage == "A":
            reduced.add(o.ref.batch)
        if reads and o.ref.batch not in reduced:
            raise ValueError(
                f"schedule '{schedule.name}' has {o.ref.relative()} before A, but a loss that is Summed is divided "
                "by a count that A sums: use another method"
            )
        all_reads, all_writes = dict.fromkeys((*o.reads, *reads)), dict.fromkeys((*o.writes, *writes))
        ops.append(replace(o, reads=tuple(all_reads), writes=tuple(all_writes)))
    return with_derived_edges(replace(schedule, ops=tuple(ops)))


def one_at_a_time(ops: Sequence[Op]) -> list[Op]:
    """The ops of a step as a chain: each waits for the one before it, and the first for the last of the step before."""
    previous = [ops[-1].ref._replace(batch=ops[-1].ref.batch - 1), *(o.ref for o in ops[:-1])]
    return [replace(o, after=(earlier,)) for o, earlier in zip(ops, previous, strict=True)]
