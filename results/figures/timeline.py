"""A picture of one step per method: from its schedule in made-up units, and from the trace of a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from nestpipe.drawing.steady_step import steady_step
from nestpipe.machine.json_files import read_json
from nestpipe.methods import UnknownMethod, find_method
from nestpipe.schedule.operations import Ref
from nestpipe.schedule.stages import STAGES
from results.artefacts import Artefact, Picture
from results.experiments.part_names import TWO
from results.figures.style import COLOURS, figure, picture
from results.frames.labels import label_of, order_of, variant_of
from results.sources import Sources

_DRAWN = ("serial", "torchrec", "2d-sp", "uniemb", "dbp-only", "fwp-only", "nestpipe", "nestpipe+2d-sp")
_CATEGORY = {
    "dense": (COLOURS[0], ""),
    "update": (COLOURS[4], ".."),
    "lookup": (COLOURS[1], "//"),
    "communication": (COLOURS[2], "\\\\"),
    "dense_sync": (COLOURS[9], "xx"),
    "input": (COLOURS[7], ""),
}
_LANES = ("input", "copy", "keys", "rows", "all2all", "compute", "allreduce")


def timeline(sources: Sources) -> Artefact:
    """Drawn schedules of every method and measured steps of those that ran."""
    pictures = [_scheduled()]
    measured = _measured(sources)
    if measured:
        pictures.append(measured)
    return Artefact(
        "timeline",
        "Timeline of a step per method (Figures 1, 4 and 5 in action)",
        pictures=tuple(pictures),
        missing=() if measured else (TWO,),
    )


def _scheduled() -> Picture:
    drawn = []
    for name in _DRAWN:
        try:
            method = find_method(name)
        except UnknownMethod:
            continue
        schedule = method.schedule(4)
        step = steady_step(schedule, lambda op: op.stage.columns)
        drawn.append((f"{name}, N = {schedule.micro_batches}", step.spans, step.length))
    return _strips(
        "timeline-schedules",
        drawn,
        "made-up units",
        "Schedules: one step t of each method, in made-up units "
        "that show only the order. Numbers: batch relative to t, micro-batch after the dot.",
    )


def _measured(sources: Sources) -> Picture | None:
    """The setting that paces dense compute, if there is one, because overlap shows there."""
    records = [r for r in sources.measured(TWO) if not r.config.get("clustering")]
    paced = [r for r in records if r.paced] or records
    drawn = []
    for record in sorted(paced, key=lambda r: (order_of(variant_of(r)), r.key)):
        path = sources.folder / "timelines" / TWO / f"{record.key}.json"
        data = _read(path)
        if data:
            drawn.append(
                (
                    f"{label_of(variant_of(record))}, N = {record.config['micro_batches']}",
                    data["spans"],
                    data["length_ms"],
                )
            )
    if not drawn:
        return None
    where = "two steps of rank 0 of a real run, paced" if paced[0].paced else "two steps of rank 0 of a real run"
    return _strips("timeline-measured", drawn, "ms", f"Measured: {where}. All strips have the same scale.")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = read_json(path)
        spans = [
            (stage, int(batch), int(micro), str(lane), float(start), float(end))
            for stage, batch, micro, lane, start, end in data["spans"]
            if stage in STAGES
        ]
        return {"spans": spans, "length_ms": float(data["length_ms"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _draw(panel: Axes, lanes: list[str], spans: Any, length: float, longest: float) -> None:
    """Operations as bars, one collection per lane and category; the wide ones are named."""
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for stage, batch, micro, lane, start, end in spans:
        begin, stop = max(0.0, start), min(length, end)
        row = len(lanes) - 1 - lanes.index(lane)
        bars.setdefault((row, STAGES[stage].category), []).append((begin, stop - begin))
        if stop - begin > longest * 0.035:
            text = Ref(stage, batch, micro).relative()
            named = panel.text((begin + stop) / 2, row, text, ha="center", va="center", fontsize=5, clip_on=True)
            named.set_in_layout(False)
    for (row, category), pieces in bars.items():
        colour, hatch = _CATEGORY[category]
        panel.broken_barh(pieces, (row - 0.4, 0.8), color=colour, hatch=hatch, edgecolor="white", linewidth=0.3)


def _strips(name: str, drawn: list[tuple[str, Any, float]], unit: str, caption: str) -> Picture:
    """One strip per method, with one row per lane."""
    columns = 2
    made, axes = figure(columns, width=5.0, height=1.55, rows=-(-len(drawn) // columns))
    longest = max(length for *_, length in drawn)
    for panel, (title, spans, length) in zip(axes, drawn, strict=False):
        used = {span[3] for span in spans}
        lanes = [lane for lane in _LANES if lane in used] + sorted(used - set(_LANES))
        _draw(panel, lanes, spans, length, longest)
        panel.set_yticks(range(len(lanes)), list(reversed(lanes)), fontsize=6)
        panel.set_title(f"{title}: {length:.0f} {unit if unit == 'ms' else ''}".rstrip(), fontsize=8)
        panel.set_xlim(0, longest)
        panel.grid(axis="y", visible=False)
        panel.tick_params(axis="x", labelsize=6)
    for panel in axes[len(drawn) :]:
        panel.set_visible(False)
    handles = [
        panel.barh([0], [0], color=colour, hatch=hatch * 2, edgecolor="white", label=title.replace("_", " "))
        for title, (colour, hatch) in _CATEGORY.items()
    ]
    made.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    alt = "Lanes of " + ", ".join(title for title, *_ in drawn) + ", operations as bars coloured by category."
    return picture(name, caption, alt, made)
