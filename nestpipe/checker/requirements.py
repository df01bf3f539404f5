"""What the engine requires of a schedule before it runs it."""

from __future__ import annotations

from nestpipe.checker.rules import unfinished_steps
from nestpipe.schedule.operations import Op, Ref, Schedule
from nestpipe.schedule.stages import STAGES


def lanes_without_waiting(shards: int, ranks: int) -> dict[str, str]:
    """For each lane that would only add hand-offs between threads, the lane to run its operations on instead.

    A CPU copies nothing to a device, and one rank has no collectives.
    """
    into = {"copy": "keys"}
    if shards == 1:
        into |= {"all2all": "compute"}
    if ranks == 1:
        into |= {"allreduce": "compute", "replicas": "compute"}
    return into


def require_runnable(schedule: Schedule) -> None:
    """Raises ValueError for a schedule that lacks a stage, leaves a step unfinished, or hides what a stage touches."""
    for name in required_operations(schedule):
        if name not in schedule.places:
            raise ValueError(f"schedule '{schedule.name}' lacks {name}: this engine cannot train without it")
    if texts := unfinished_steps(schedule):
        raise ValueError(f"schedule '{schedule.name}': {texts[0]}")
    for op in schedule.ops:
        writes = _written(op, schedule)
        touched = {*op.stage.reads, *writes} - {"plan-1"}
        hidden = sorted(touched - {*op.reads, *op.writes}) or sorted(writes - {*op.writes})
        if hidden:
            name = f"schedule '{schedule.name}': {op.ref.relative()}"
            raise ValueError(f"{name} touches {', '.join(hidden)}, which it does not declare")


def required_operations(schedule: Schedule) -> list[str]:
    """Names in the step (``E.2``) of the operations that every step of ``schedule`` needs."""
    need = {
        "always": True,
        "replicated": schedule.replicated,
        "buffered": not schedule.updates_table,
        "never": False,
    }
    return [
        Ref(letter, 0, micro).in_step()
        for letter, stage in STAGES.items()
        if need[stage.required]
        for micro in (range(1, schedule.micro_batches + 1) if stage.per_micro_batch else (0,))
    ]


def _written(op: Op, schedule: Schedule) -> set[str]:
    """What the stage writes in the engine. U writes the table if it updates that itself; G writes what D then sums."""
    written = set(op.stage.writes)
    if op.ref.stage == "U" and schedule.updates_table:
        written = written - {"buffer"} | {"table"}
    if op.ref.stage == "G" and schedule.replicated and not schedule.averages_replicas:
        written = {"arrived"}
    return written
