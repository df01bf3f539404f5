"""Draws docs/pictures: ``python docs/make_pictures.py``. Schedules run on virtual clocks; nothing is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from nestpipe.drawing.steady_step import steady_step
from nestpipe.schedule.operations import Op, Schedule
from nestpipe.schedule.stages import STAGES
from nestpipe.schedule.templates import nestpipe, serial

COLOURS = {
    "dense": "#3b6fb6",
    "update": "#7b5ea7",
    "communication": "#d9822b",
    "lookup": "#3a9a6d",
    "input": "#8a8f98",
    "dense_sync": "#c2508a",
}
NAMES = {
    "dense": "dense forward and backward (F, B)",
    "communication": "embedding and gradient All2All (E, G)",
    "lookup": "lookup: copy, key routing, retrieval, write-back (H, K, R, W)",
    "update": "updates and dual-buffer synchronisation (U, O, S)",
    "input": "data prefetch (P)",
    "dense_sync": "dense AllReduce (A)",
}
LANES = ("input", "copy", "keys", "rows", "all2all", "compute", "allreduce")


def step_picture(path: Path) -> None:
    """One step of serial training above one step of NestPipe, on the same time axis."""
    plt.rcParams.update({"svg.hashsalt": "nestpipe", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, panels = plt.subplots(2, 1, figsize=(9.6, 5.4), sharex=True, facecolor="white")
    for panel, schedule, title in zip(
        panels,
        (serial(), nestpipe(4)),
        (
            "serial: every lookup and every exchange stops the compute lane",
            "NestPipe: lookups of later batches and exchanges of other micro-batches overlap compute",
        ),
        strict=True,
    ):
        _draw(panel, schedule, title)
    panels[1].set_xlabel("time, in made-up units: the same work takes the same time in both panels", fontsize=9)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in NAMES]
    figure.legend(handles, NAMES.values(), loc="lower center", ncols=2, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _draw(panel: plt.Axes, schedule: Schedule, title: str) -> None:
    step = steady_step(schedule, lambda op: _units(op, schedule.micro_batches))
    for span in step.spans:
        begin, end = max(span.start, 0.0), min(span.end, step.length)
        colour = COLOURS[STAGES[span.stage].category]
        y = LANES.index(span.lane)
        alpha = 1.0 if span.batch == 0 else 0.55
        panel.barh(y, end - begin, left=begin, height=0.78, color=colour, alpha=alpha, edgecolor="white")
        if end - begin > 2.2:
            panel.text((begin + end) / 2, y, span.name, ha="center", va="center", fontsize=7, color="white")
    panel.axvline(step.length, color="#333333", linewidth=1)
    panel.text(step.length + 0.5, len(LANES) - 1, "end of step", fontsize=8, va="center", color="#333333")
    panel.set_yticks(range(len(LANES)), LANES, fontsize=8)
    panel.set_ylim(len(LANES) - 0.5, -0.5)
    panel.set_xlim(0, 110)
    panel.set_xticks([])
    panel.set_title(title, fontsize=9.5, loc="left")
    for side in ("top", "right", "bottom", "left"):
        panel.spines[side].set_visible(False)
    panel.tick_params(length=0)


def _units(op: Op, micro_batches: int) -> float:
    """The time of one operation. Micro-batches share the time of a whole batch."""
    return op.stage.units / (micro_batches if op.stage.per_micro_batch else 1)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures"
    step_picture(folder / "step.svg")
