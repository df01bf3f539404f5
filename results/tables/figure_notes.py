"""Points of the paper's figures that public notes name, next to the values of the simulated records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from results.artefacts import Mismatch, Table
from results.experiments.part_names import GPU, NPU, NPU_MICRO_BATCHES, NPU_SIZES
from results.frames.frames import SIZES
from results.frames.labels import PAPER_METHODS, Variant, label_of, only
from results.published import Published
from results.sources import Sources
from results.tables.reasons import why_note
from results.tables.side_by_side import CELLS, HALF_UNIT, NOTHING, TOLERANCE_PCT, shown

#: Where the values of a cluster are looked up; the first has the settings of the tables.
_PARTS_OF = {"NPU": (NPU, NPU_MICRO_BATCHES, NPU_SIZES), "GPU": (GPU,)}
_QUANTITY = {
    "lookup_share": "exposed lookup, share of the step",
    "comm_share": "exposed communication, share of the step",
    "utilisation": "utilisation",
    "utilisation_at_least": "utilisation (published: at least)",
    "total_comm": "total communication",
    "exposed_comm": "exposed communication",
    "exposed_ratio": "exposed communication, share of its total",
    "lookup_reduction": "exposed lookup saved",
}
_COLUMN = {
    "lookup_share": "lookup_share",
    "comm_share": "comm_share",
    "utilisation": "utilisation_pct",
    "utilisation_at_least": "utilisation_pct",
    "total_comm": "communication_ms",
    "exposed_comm": "exposed_communication_ms",
    "exposed_ratio": "exposed_pct",
}
#: Methods that have a frozen window, so a micro-batch size.
_WINDOWED = ("nestpipe", "fwp-only", "nestpipe+2d-sp")
_CAPTION = "[N]: from public notes on the paper, consistent with each other, not printed in its tables."


@dataclass(frozen=True)
class Note:
    """A published note and the simulated records' value for it, None if there is no such record."""

    published: Published
    simulated: float | None

    @property
    def label(self) -> str:
        return label_of(Variant(PAPER_METHODS[self.published.method]))

    @property
    def error_pct(self) -> float | None:
        return None if self.simulated is None else (self.simulated / self.published.value - 1) * 100


def notes_of(sources: Sources, where: str) -> list[Note]:
    """The published notes of figure or table ``where``."""
    return [
        Note(row, _simulated_value(sources, row))
        for row in sources.published
        if row.where == where and row.mark == "N" and row.metric in _QUANTITY
    ]


def note_table(notes: list[Note], name: str, title: str) -> Table:
    """A row per note: published, simulated, error."""
    rows = []
    for note in notes:
        point = note.published
        quantity = _quantity(point)
        line = {"quantity": quantity, "method": note.label, "published": f"{shown(point.value, 2)} [{point.mark}]"}
        line["simulated"] = NOTHING if note.simulated is None else shown(note.simulated, 2)
        line["error %"] = NOTHING if note.error_pct is None else f"{note.error_pct:+.1f}"
        rows.append(line | {"unit": point.unit})
    frame = pd.DataFrame(rows)
    if all(note.simulated is None for note in notes):
        frame = frame.drop(columns="simulated", errors="ignore")
    cells = [cell for note in notes for cell in _cells(note)]
    return Table(name, title, _CAPTION, frame, pd.DataFrame(cells, columns=CELLS))


def _quantity(point: Published) -> str:
    text = _QUANTITY[point.metric] + f", {point.workers:,} workers"
    if point.setting:
        text += ", " + point.setting.replace("_", " ").replace("=", " ").replace(" clustering", ", clustering")
    return text


def _cells(note: Note) -> Iterator[dict[str, object]]:
    """Rows of the CSV file."""
    point = note.published
    facts = {
        "metric": _quantity(point),
        "workers": point.workers,
        "label": note.label,
        "conditions": point.setting,
        "unit": point.unit,
    }
    yield {**facts, "kind": "published", "value": point.value, "mark": point.mark}
    if note.simulated is not None:
        floor = HALF_UNIT / point.value * 100
        more = {"mark": "", "error_pct": note.error_pct, "floor_pct": floor}
        yield {**facts, "kind": "simulated", "value": note.simulated, **more}


def note_mismatches(notes: list[Note], title: str) -> list[Mismatch]:
    """Notes that the simulator misses by more than the tolerance."""
    found = []
    for note in notes:
        point = note.published
        if note.simulated is None or note.error_pct is None:
            continue
        met = point.metric.endswith("at_least") and note.simulated >= point.value
        if met or abs(note.error_pct) <= TOLERANCE_PCT + half_unit(point.value) / point.value * 100:
            continue
        what = (
            f"{note.label}, {point.workers:,} workers{', ' + point.setting if point.setting else ''}: "
            f"{_QUANTITY[point.metric]} published {point.value:g} {point.unit} [N], "
            f"simulated {note.simulated:.2f} ({note.error_pct:+.1f} %)"
        )
        found.append(Mismatch(title, what, why_note(point.metric, point.setting, point.workers)))
    return found


def half_unit(value: float) -> float:
    """Half a unit of the last digit with which ``value`` is written."""
    decimals = len(f"{value:g}".partition(".")[2])
    return 0.5 * 10.0**-decimals


def _simulated_value(sources: Sources, point: Published) -> float | None:
    parts = _PARTS_OF[point.cluster]
    usual = only(sources.simulated_means(parts[0]), "nestpipe")
    if usual.empty:
        return None
    # What a note does not name is as in the tables.
    reference = usual.iloc[0]
    setting = dict(pair.split("=") for pair in point.setting.split())
    frame = sources.simulated_means(*parts)
    near = frame[frame["workers"] == point.workers]
    for name in ("clustering", *SIZES):
        value = setting.get(name, reference[name])
        near = near[near[name].astype(str) == str(value)]
    micro_batch = int(setting.get("micro_batch", reference["micro_batch"]))
    near = near[(near["micro_batch"] == micro_batch) | ~near["method"].isin(_WINDOWED)]
    mine = only(near, PAPER_METHODS[point.method])
    if mine.empty:
        return None
    if point.metric == "lookup_reduction":
        serial = only(near, "serial")
        return _reduction(mine, serial) if len(serial) else None
    return float(mine[_COLUMN[point.metric]].iloc[0])


def _reduction(mine: pd.DataFrame, serial: pd.DataFrame) -> float:
    # A pipeline's exposed lookup is the hand-over between its buffers, the whole of ``update`` in the profile.
    left = float(mine["exposed_lookup_ms"].iloc[0] + mine["update_ms"].iloc[0])
    return (1 - left / float(serial["exposed_lookup_ms"].iloc[0])) * 100
