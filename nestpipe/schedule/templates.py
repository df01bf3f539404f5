"""Schedules of methods that this engine runs: serial training, NestPipe, and dual-buffer pipelining only."""

from __future__ import annotations

from nestpipe.schedule.building import one_at_a_time, op, schedule
from nestpipe.schedule.frozen_window import frozen_window
from nestpipe.schedule.operations import Schedule


def serial(micro_batches: int = 1) -> Schedule:
    """Unpipelined synchronous training: one operation at a time. ``serial(N)`` splits the dense part."""
    steps = [op(stage) for stage in "PHKR"]
    for m in range(1, micro_batches + 1):
        steps += [op(f"{stage}.{m}") for stage in "EFBG"]
    steps += [op(stage) for stage in "AUOW"]
    name = "serial" if micro_batches == 1 else f"serial({micro_batches})"
    return schedule(name, micro_batches, one_at_a_time(steps), derive=False)


def nestpipe(micro_batches: int = 8, received: int = 3, name: str = "nestpipe") -> Schedule:
    """NestPipe (the paper's DBP and FWP): lookups hide behind the previous batch, and exchanges behind dense compute.

    ``received``: how many micro-batches may have received their embeddings without having used them yet. U waits
    for the gradients, and O for the AllReduce. S and the first All2All of the next batch wait only for U.
    """
    first = [op(f"E.{m}") for m in range(2, min(received, micro_batches) + 1)]
    ahead = [op("P+4"), op("H+3"), op("K+2"), op("W-1"), op("R+1")]
    end = [op("A"), op("U"), op("S+1"), op("E+1.1"), op("O")]
    ops = [*ahead, *first, *frozen_window(micro_batches, received), *end]
    return schedule(name, micro_batches, ops, received=received)


def dbp_only() -> Schedule:
    """Dual-buffer pipelining only: one micro-batch, so both All2Alls of a batch are exposed."""
    return nestpipe(1, name="dbp-only")
