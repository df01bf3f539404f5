"""The frozen window: parameters stay fixed while a batch's exchanges hide behind the dense compute of the batch."""

from __future__ import annotations

from nestpipe.schedule.building import op, schedule
from nestpipe.schedule.operations import Op, Schedule


def frozen_window(micro_batches: int, received: int) -> list[Op]:
    """FWP's 2N All2Alls: E runs up to ``received`` micro-batches ahead of the compute lane, and G one behind it."""
    ops: list[Op] = []
    for m in range(1, micro_batches + 1):
        ops += [op(f"{stage}.{m}") for stage in "FBG"]
        if m + received <= micro_batches:
            ops.append(op(f"E.{m + received}"))
    return ops


def fwp_only(micro_batches: int = 8, received: int = 3) -> Schedule:
    """Frozen-window pipelining only: a batch is read, routed and retrieved only after the previous one is done."""
    lookup = [op("P", after="O-1 W-1"), op("H", after="P"), op("K", after="H"), op("R", after="K")]
    first = [op(f"E.{m}") for m in range(1, min(received, micro_batches) + 1)]
    ops = [*lookup, *first, *frozen_window(micro_batches, received), op("A"), op("U"), op("O"), op("W")]
    return schedule("fwp-only", micro_batches, ops, received=received)
