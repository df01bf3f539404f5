"""Virtual-time lanes: when each operation of a schedule would run, given how long each takes.

The order of operations is static, so a run is one pass over the unrolled schedule: an operation
starts when its lane is free and what it waits for is done; a collective proceeds when the last
member of its group has entered. All workers are computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nestpipe.consistency import linear_extension
from nestpipe.schedule import Op
from nestpipe.trace import Timeline, waits


def virtual_timeline(ops: Sequence[Op], duration: np.ndarray, group_size: int | None = None) -> Timeline:
    """Run ``ops`` (unrolled) on virtual clocks.

    ``duration``: seconds, float64 [ops, workers], for a collective from when all have entered.
    ``group_size``: workers that an All2All or key exchange joins, consecutive ones (default: all);
    AllReduce joins all. Raises ValueError where the workers cannot be split so.
    """
    workers = duration.shape[1]
    size = group_size or workers
    if workers % size:
        raise ValueError(f"{workers} workers cannot be split into groups of {size}")
    before = waits(ops)
    position = {op.ref: i for i, op in enumerate(ops)}
    start, ready, end = (np.zeros(duration.shape) for _ in range(3))
    for op in linear_extension(ops):
        i = position[op.ref]
        needs = before[i][before[i] >= 0]
        start[i] = end[needs].max(axis=0) if len(needs) else 0.0
        if op.stage.group is None:
            ready[i] = start[i]
        elif op.stage.group == "allreduce":
            ready[i] = start[i].max()
        else:
            ready[i] = np.repeat(start[i].reshape(-1, size).max(axis=1), size)
        end[i] = ready[i] + duration[i]
    return Timeline(tuple(op.ref for op in ops), tuple(op.lane for op in ops), start, ready, end, before)
