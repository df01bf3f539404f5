"""Draws a step of a schedule: lanes down, time across, in made-up units that only show the order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nestpipe.schedule.operations import Op, Schedule
from nestpipe.schedule.stages import STAGES
from nestpipe.simulator.virtual_lanes import virtual_timeline

#: Columns that an operation takes in a drawing. Micro-batch stages are per micro-batch.
UNITS = {"P": 3, "H": 2, "K": 2, "R": 4, "W": 2, "S": 1, "E": 1, "F": 1, "B": 2, "G": 1, "D": 1, "A": 2, "U": 1, "O": 1}


def grid(template: Schedule, columns: int | None = None) -> str:
    """One steady-state step as text; operations named relative to the step (``R+1``: for the next batch).

    An operation that began in the step before is marked ``<``. Idle compute is dots. A step that is wider than
    ``columns`` goes on below itself.
    """
    steps = template.depth + max(template.rings.values()) + 3
    ops = step_by_step(template).unroll(2 * steps)
    durations = np.array([[float(UNITS[op.ref.stage])] for op in ops])
    timeline = virtual_timeline(ops, durations)
    middle = steps - 1
    start, end = timeline.start[:, 0].astype(int), timeline.end[:, 0].astype(int)
    bounds = [
        max(end[i] for i, op in enumerate(ops) if op.lane == "compute" and op.ref.batch == b)
        for b in (middle - 1, middle)
    ]
    low, high = int(bounds[0]), int(bounds[1])
    width = max(len(_label(op, middle)) for op in ops if op.ref.batch < middle + 9) + 1
    rows: dict[str, list[str]] = {}
    usual = list(dict.fromkeys(stage.lane for stage in STAGES.values()))
    for lane in sorted(template.lanes, key=lambda lane: usual.index(lane) if lane in usual else len(usual)):
        cells = ["." if lane == "compute" else " "] * (high - low)
        for i, op in enumerate(ops):
            if op.lane != lane or end[i] <= low or start[i] >= high:
                continue
            for column in range(max(start[i], low), min(end[i], high)):
                cells[column - low] = "="
            first = max(start[i], low) - low
            cells[first] = ("<" if start[i] < low else "") + _label(op, middle)
        rows[lane] = cells
    piece = high - low if columns is None else max(4, (columns - len("allreduce ||")) // width)
    return "\n\n".join(
        "\n".join(
            f"{lane:>9} |" + "".join(_pad(cell, width) for cell in cells[at : at + piece]) + "|"
            for lane, cells in rows.items()
        )
        for at in range(0, high - low, piece)
    )


def step_by_step(template: Schedule) -> Schedule:
    """As the engine is driven: a step is handed to the lanes when the compute lane has done the step before.

    Raises ValueError where no operation computes.
    """
    last = next((op.ref for op in reversed(template.ops) if op.lane == "compute"), None)
    if last is None:
        raise ValueError(f"{template.name}: no operation is on the lane 'compute', so a step has no end; add one")
    before = last._replace(batch=last.batch - 1)
    return replace(template, ops=tuple(replace(op, after=(*op.after, before)) for op in template.ops))


def _label(op: Op, step: int) -> str:
    return op.ref._replace(batch=op.ref.batch - step).relative()


def _pad(cell: str, width: int) -> str:
    if cell in ("=", "."):
        return cell * width
    return cell.ljust(width, "=") if cell != " " else " " * width
