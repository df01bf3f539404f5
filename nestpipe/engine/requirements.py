"""What the engine asks of a schedule before it runs it."""

from __future__ import annotations

from nestpipe.checker.rules import unfinished_steps
from nestpipe.schedule.operations import Op, Schedule

#: A stage may write one resource in place of another: U the table itself, G what D then brings to the accumulator.
INSTEAD = {"U": {"buffer": "table"}, "G": {"accumulator": "arrived"}}


def lanes_without_waiting(shards: int, ranks: int) -> dict[str, str]:
    """Lanes that would only add hand-offs between threads: no copy on a CPU, no collective on one rank."""
    alone = {"all2all": "compute"} if shards == 1 else {}
    alone |= {"allreduce": "compute", "replicas": "compute"} if ranks == 1 else {}
    return {"copy": "keys", **alone}


def require_runnable(schedule: Schedule) -> None:
    """Raises ValueError for a schedule that lacks a stage or does not declare what a stage really touches."""
    writes = {op.ref.stage: op.writes for op in schedule.ops}
    per_micro = "EFBGD" if "arrived" in writes.get("G", ()) else "EFBG"
    whole = "PHKRAUO" if "table" in writes.get("U", ()) else "PHKRAUOW"
    needed = [(s, m) for s in per_micro for m in range(1, schedule.micro_batches + 1)] + [(s, 0) for s in whole]
    present = {(op.ref.stage, op.ref.micro) for op in schedule.ops}
    for stage, micro in needed:
        if (stage, micro) not in present:
            name = stage + (f".{micro}" if micro else "")
            raise ValueError(f"schedule '{schedule.name}' lacks {name}: this engine cannot train without it")
    if texts := unfinished_steps(schedule):
        raise ValueError(f"schedule '{schedule.name}': {texts[0]}")
    for op in schedule.ops:
        touched, written = _touched(op)
        hidden = sorted(touched - {*op.reads, *op.writes}) or sorted(written - {*op.writes})
        if hidden:
            name = f"schedule '{schedule.name}': {op.ref.relative()}"
            raise ValueError(f"{name} touches {', '.join(hidden)}, which it does not declare")


def _touched(op: Op) -> tuple[set[str], set[str]]:
    """What the stage touches, and what of it it writes."""
    instead = {a: b for a, b in INSTEAD.get(op.ref.stage, {}).items() if b in op.writes and a not in op.writes}
    written = {instead.get(name, name) for name in op.stage.writes}
    return {*op.stage.reads, *written} - {"plan-1"}, written
