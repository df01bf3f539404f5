"""Points of the paper's figures that public notes name, beside what the simulator has for them."""

from __future__ import annotations

import pandas as pd

from results.artefacts import Mismatch, Sources, Table
from results.frames.frames import PAPER_LABELS
from results.frames.series import comparison, simulated_means
from results.frames.side_by_side import TOLERANCE_PCT
from results.published import Published

_PARTS = {"NPU": ("simulated", "simulated-micro-batches", "simulated-sizes"), "GPU": ("simulated-gpu",)}
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
#: Rows whose methods have a frozen window, so a micro-batch size.
_WINDOWED = ("NestPipe", "FWP-only", "NestPipe+2D-SP")
_CAPTION = "[N]: from public notes on the paper, consistent with each other, not printed in its tables."

#: (metric, what the setting or the number of workers is) -> why the simulator differs.
_WHY = {
    (
        "comm_share",
        128,
    ): "9.2 % of the tables' 2562 ms is 236 ms; All2All of few workers is the model's least certain time.",
    ("lookup_share", 128): "Not explained: 24.4 % of the tables' 2562 ms is 625 ms, TorchRec minus UniEmb gives 593.",
    ("exposed_ratio", "micro_batch=16 clustering=off"): "Not explained: duplication grows the total, but still 2 of 64 "
    "All2Alls are exposed, 3.1 %.",
    ("exposed_comm", "micro_batch=16 clustering=on"): "Not explained: less than 1/32 of the total; first and last "
    "micro-batch may be smaller.",
    ("exposed_comm", "sequence_length=2048"): "Not explained: twice the items would be nearly twice the keys; the "
    "paper's reference length is not published.",
    ("total_comm", "micro_batch=16 clustering=off"): "Key repetition was measured on other data than the paper's.",
}


def note_table(sources: Sources, where: str, name: str, title: str) -> Table:
    """Published notes of figure or table ``where`` with the simulated value of each."""
    rows = []
    for row in _notes(sources, where):
        quantity = _QUANTITY[row.metric] + f", {row.workers:,} workers"
        if row.setting:
            quantity += ", " + row.setting.replace("_", " ").replace("=", " ").replace(" clustering", ", clustering")
        rows.append(
            {
                "quantity": quantity,
                "label": PAPER_LABELS[row.method],
                "workers": row.workers,
                "unit": row.unit,
                "mark": row.mark,
                "published": row.value,
                "simulated": simulated_value(sources, row),
                "conditions": row.setting,
            }
        )
    return comparison(name, title, _CAPTION, rows)


def note_mismatches(sources: Sources, where: str, title: str) -> list[Mismatch]:
    """Notes that the simulator misses by more than the tolerance."""
    found = []
    for row in _notes(sources, where):
        simulated = simulated_value(sources, row)
        if simulated is None:
            continue
        error = (simulated / row.value - 1) * 100
        at_least = row.metric.endswith("at_least")
        if abs(error) <= TOLERANCE_PCT + half_unit(row.value) / row.value * 100 or (
            at_least and simulated >= row.value
        ):
            continue
        what = (
            f"{PAPER_LABELS[row.method]}, {row.workers:,} workers{', ' + row.setting if row.setting else ''}: "
            f"{_QUANTITY[row.metric]} published {row.value:g} {row.unit} [N], "
            f"simulated {simulated:.2f} ({error:+.1f} %)"
        )
        why = _WHY.get((row.metric, row.setting)) or _WHY.get((row.metric, row.workers))
        found.append(Mismatch(title, what, why or "Small; no cause is known."))
    return found


def half_unit(value: float) -> float:
    """Half a unit of the last digit with which ``value`` is written."""
    decimals = len(f"{value:g}".partition(".")[2])
    return 0.5 * 10.0**-decimals


def simulated_value(sources: Sources, row: Published) -> float | None:
    """The simulated records' value for a published note; None where there is no such record."""
    parts = _PARTS[row.cluster]
    usual, frame = simulated_means(sources.of(parts[0])), simulated_means(sources.of(*parts))
    if usual.empty:
        return None
    # What a note does not name is as in the tables.
    reference = usual[usual["label"] == "NestPipe"].iloc[0]
    setting = dict(pair.split("=") for pair in row.setting.split())
    near = frame[frame["workers"] == row.workers]
    for name in ("sequence_length", "clustering", "embedding_dim", "dense_layers"):
        value = setting.get(name, reference[name])
        near = near[near[name].astype(str) == str(value)]
    micro_batch = int(setting.get("micro_batch", reference["micro_batch"]))
    near = near[(near["micro_batch"] == micro_batch) | ~near["label"].isin(_WINDOWED)]
    mine = near[near["label"] == PAPER_LABELS[row.method]]
    if mine.empty:
        return None
    if row.metric == "lookup_reduction":
        serial = near[near["label"] == "TorchRec (serial)"]
        return _reduction(mine, serial) if len(serial) else None
    return float(mine[_COLUMN[row.metric]].iloc[0])


def _reduction(mine: pd.DataFrame, serial: pd.DataFrame) -> float:
    # A pipeline's exposed lookup is the hand-over between its buffers, the whole of ``update`` in the profile.
    left = float(mine["exposed_lookup_ms"].iloc[0] + mine["update_ms"].iloc[0])
    return (1 - left / float(serial["exposed_lookup_ms"].iloc[0])) * 100


def _notes(sources: Sources, where: str) -> list[Published]:
    return [row for row in sources.published if row.where == where and row.mark == "N" and row.metric in _QUANTITY]
