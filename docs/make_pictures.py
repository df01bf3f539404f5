"""Draws docs/pictures: `python docs/make_pictures.py`. Schedules run on virtual clocks; nothing is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

from nestpipe.drawing.text_grid import step_by_step
from nestpipe.schedule.operations import Schedule
from nestpipe.schedule.stages import STAGES
from nestpipe.schedule.templates import nestpipe, serial
from nestpipe.simulator.virtual_lanes import virtual_timeline

#: Made-up times of a whole batch; micro-batches share those of E, F, B and G.
UNITS = {"P": 6, "H": 3, "K": 5, "R": 14, "W": 8, "S": 1, "E": 10, "F": 14, "B": 28, "G": 10, "A": 3, "U": 2, "O": 1}
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
BATCH = 8  # the batch whose step is shown: far from the first


def step_picture(path: Path) -> None:
    """One step of serial above one step of NestPipe, on one time axis."""
    plt.rcParams.update({"svg.hashsalt": "nestpipe", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, panels = plt.subplots(2, 1, figsize=(9.6, 5.4), sharex=True, facecolor="white")
    for panel, template, title in zip(
        panels,
        (serial(), nestpipe(4)),
        (
            "serial: every lookup and every exchange stops the compute lane",
            "NestPipe: lookups of later batches and exchanges of other micro-batches run beside compute",
        ),
        strict=True,
    ):
        _draw(panel, template, title)
    panels[1].set_xlabel("time, in made-up units: both panels give the same time to the same work", fontsize=9)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in NAMES]
    figure.legend(handles, NAMES.values(), loc="lower center", ncols=2, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _draw(panel: plt.Axes, template: Schedule, title: str) -> None:
    ops = step_by_step(template).unroll(2 * BATCH)
    share = [template.micro_batches if STAGES[op.ref.stage].per_micro_batch else 1 for op in ops]
    units = np.array([[UNITS[op.ref.stage] / n] for op, n in zip(ops, share, strict=True)], dtype=float)
    timeline = virtual_timeline(ops, units)
    start, end = timeline.start[:, 0], timeline.end[:, 0]
    compute = [i for i, op in enumerate(ops) if op.lane == "compute"]
    low, high = (max(end[i] for i in compute if ops[i].ref.batch == batch) for batch in (BATCH - 1, BATCH))
    for i, op in enumerate(ops):
        if end[i] <= low or start[i] >= high or start[i] == end[i]:
            continue
        begin, width = max(start[i], low) - low, min(end[i], high) - max(start[i], low)
        colour = COLOURS[STAGES[op.ref.stage].category]
        y = LANES.index(op.lane)
        mine = op.ref.batch == BATCH
        panel.barh(y, width, left=begin, height=0.78, color=colour, alpha=1.0 if mine else 0.55, edgecolor="white")
        if width > 2.2:
            name = op.ref._replace(batch=op.ref.batch - BATCH).relative()
            panel.text(begin + width / 2, y, name, ha="center", va="center", fontsize=7, color="white")
    panel.axvline(high - low, color="#333333", linewidth=1)
    panel.text(high - low + 0.5, len(LANES) - 1, "end of step", fontsize=8, va="center", color="#333333")
    panel.set_yticks(range(len(LANES)), LANES, fontsize=8)
    panel.set_ylim(len(LANES) - 0.5, -0.5)
    panel.set_xlim(0, 110)
    panel.set_xticks([])
    panel.set_title(title, fontsize=9.5, loc="left")
    for side in ("top", "right", "bottom", "left"):
        panel.spines[side].set_visible(False)
    panel.tick_params(length=0)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures"
    step_picture(folder / "step.svg")
