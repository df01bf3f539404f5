"""Draws a step of a schedule as text: a row per lane, time from left to right, in units that only show the order."""

from __future__ import annotations

from nestpipe.drawing.steady_step import StepSpan, steady_batch, steady_step
from nestpipe.schedule.operations import Schedule
from nestpipe.schedule.stages import COMPUTE_LANE, STAGES


def grid(schedule: Schedule, columns: int | None = None) -> str:
    """One steady-state step as text. Operations are named relative to the step (``R+1``: for the next batch).

    ``<`` marks an operation that began in the step before. Dots are idle time of the compute lane. A step that is
    wider than ``columns`` characters is split into blocks, one below the other.
    """
    step = steady_step(schedule, lambda op: op.stage.columns)
    width = _cell_width(schedule)
    usual = list(dict.fromkeys(stage.lane for stage in STAGES.values()))
    lanes = sorted(schedule.lanes, key=lambda lane: usual.index(lane) if lane in usual else len(usual))
    rows = {lane: _cells(lane, [s for s in step.spans if s.lane == lane], int(step.length)) for lane in lanes}
    piece = int(step.length) if columns is None else max(4, (columns - len("allreduce ||")) // width)
    return "\n\n".join(
        "\n".join(
            f"{lane:>9} |" + "".join(_pad(cell, width) for cell in cells[at : at + piece]) + "|"
            for lane, cells in rows.items()
        )
        for at in range(0, int(step.length), piece)
    )


def _cell_width(schedule: Schedule) -> int:
    """The width of a column in characters: the longest name in a run up to the steady batch, and a space."""
    furthest = -(steady_batch(schedule) - 1)
    return max(len(op.ref._replace(batch=furthest).relative()) for op in schedule.ops) + 1


def _cells(lane: str, spans: list[StepSpan], length: int) -> list[str]:
    cells = ["." if lane == COMPUTE_LANE else " "] * length
    for span in spans:
        first, last = max(int(span.start), 0), min(int(span.end), length)
        cells[first:last] = ["="] * (last - first)
        cells[first] = ("<" if span.start < 0 else "") + span.name
    return cells


def _pad(cell: str, width: int) -> str:
    if cell in ("=", "."):
        return cell * width
    return cell.ljust(width, "=") if cell != " " else " " * width
