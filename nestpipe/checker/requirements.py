"""What the engine requires of a schedule before it runs it."""

from __future__ import annotations

from nestpipe.checker.rules import hidden_accesses, unfinished_steps
from nestpipe.schedule.operations import Ref, Schedule
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
    if schedule.averages_replicas:
        raise ValueError(f"schedule '{schedule.name}': its D averages replicas, which this engine does not do")
    if texts := [*unfinished_steps(schedule), *hidden_accesses(schedule)]:
        raise ValueError(f"schedule '{schedule.name}': {texts[0]}")


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
