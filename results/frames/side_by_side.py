"""Numbers of the three kinds put side by side, each in its own column, with the error per cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from nestpipe.measurement.record import Record
from results.artefacts import Mismatch, Table, distinct
from results.frames.frames import describe, label_of, medians, order_of, ratios, step_frame, told_apart

#: Columns of the long form. ``low``, ``high``: quartiles over steps, or the range over rounds for a speed-up.
CELLS = [
    "metric",
    "workers",
    "label",
    "kind",
    "conditions",
    "value",
    "low",
    "high",
    "n",
    "unit",
    "mark",
    "error_pct",
    "floor_pct",
]
#: Published numbers have two decimals.
HALF_UNIT = 0.005
#: What a cell shows that this machine, or the paper, cannot fill.
NOTHING = "-"
#: A simulated cell counts as not matching beyond this and the published cell's rounding, percent.
TOLERANCE_PCT = 2.0


@dataclass(frozen=True)
class Metric:
    """``published``: its name in published.csv; ``digits``: decimals shown; ``measured``: metric of a record (or
    "speedup"), None where measured runs have none; ``scale``: divides a simulated value into the published unit."""

    title: str
    published: str
    unit: str
    digits: int
    measured: str | None
    simulated: Callable[[Mapping[str, float]], float]
    scale: float = 1.0
    measured_unit: str = ""


STEP = Metric("step latency", "step_latency", "ms", 2, "step_ms", lambda m: m["step_ms"])
SPEEDUP = Metric("speed-up over TorchRec", "speedup", "x", 2, "speedup", lambda m: m["speedup"])
# What a pipeline exposes of its lookups is the hand-over between the two buffers, stage S, in the simulator's
# published profiles the whole of ``update``.
LOOKUP = Metric(
    "exposed lookup", "lookup", "ms", 2, "exposed_lookup_ms", lambda m: m["exposed_lookup_ms"] + m["update_ms"]
)
COMMUNICATION = Metric(
    "exposed communication", "comm", "ms", 2, "exposed_communication_ms", lambda m: m["exposed_communication_ms"]
)
EXPOSED = Metric(
    "exposed communication",
    "exposed_comm",
    "ms",
    2,
    "exposed_communication_ms",
    lambda m: m["exposed_communication_ms"],
)
TOTAL = Metric("total communication", "total_comm", "ms", 2, "communication_ms", lambda m: m["communication_ms"])
QPS = Metric("QPS", "qps", "1e5/s", 2, "qps", lambda m: m["qps"], 1e5, "samples/s")
SCALING = Metric("scaling efficiency", "scaling", "%", 2, "scaling", lambda m: m["scaling"])


def simulated_cells(
    records: Sequence[Record], metrics: Sequence[Metric], base_workers: int | None = None
) -> pd.DataFrame:
    """A row per record and metric: means over the steps, speed-up over serial, efficiency against ``base_workers``."""
    rows = []
    kept = [r for r in distinct(records) if r.kind == "simulated"]
    means = {r.key: {name: float(np.mean(v)) for name, v in r.metrics.items() if len(v)} for r in kept}
    by_place = {(r.workers, r.method): means[r.key] for r in kept}
    for record in kept:
        mean = dict(means[record.key])
        serial = by_place.get((record.workers, "serial"))
        if serial:
            mean["speedup"] = serial["step_ms"] / mean["step_ms"]
        base = by_place.get((base_workers, record.method)) if base_workers else None
        if base and base_workers and record.workers != base_workers:
            mean["scaling"] = mean["qps"] / record.workers / (base["qps"] / base_workers) * 100
        for metric in metrics:
            try:
                value = metric.simulated(mean) / metric.scale
            except KeyError:
                continue
            facts = {"metric": metric.title, "workers": record.workers, "label": label_of(record)}
            rows.append(
                {**facts, "kind": "simulated", "conditions": describe(record), "value": value, "unit": metric.unit}
            )
    return pd.DataFrame(rows, columns=CELLS)


def published_cells(published: pd.DataFrame, metrics: Sequence[Metric]) -> pd.DataFrame:
    """The rows of ``results.frames.frames.published_frame`` that belong to ``metrics``."""
    titles = {metric.published: metric.title for metric in metrics}
    frame = published[published["metric"].isin(titles)]
    return frame.assign(
        metric=frame["metric"].map(titles),
        kind="published",
        conditions=frame["cluster"] + ", " + frame["dataset"],
        floor_pct=HALF_UNIT / frame["value"] * 100,
    ).reindex(columns=CELLS)


def measured_cells(
    records: Sequence[Record], metrics: Sequence[Metric], base_workers: int | None = None
) -> pd.DataFrame:
    """Medians over steps and spread, per setting; speed-up over serial within a session."""
    steps = told_apart(step_frame(r for r in records if r.kind == "measured"))
    names = {m.measured: m for m in metrics if m.measured}
    plain = [name for name in names if name not in ("speedup", "scaling")]
    frames = [medians(steps, plain)]
    if "speedup" in names:
        frames.append(ratios(steps, "TorchRec (serial)"))
    if "scaling" in names and base_workers:
        frames.append(_scaling(medians(steps, ["qps"]), base_workers))
    frame = pd.concat([f for f in frames if len(f)] or frames[:1], ignore_index=True)
    units = {m.title: m.measured_unit or m.unit for m in metrics}
    frame["metric"] = frame["metric"].map({name: m.title for name, m in names.items()})
    return frame.assign(kind="measured", unit=frame["metric"].map(units)).reindex(columns=CELLS)


def _scaling(qps: pd.DataFrame, base_workers: int) -> pd.DataFrame:
    """QPS per worker against that of ``base_workers`` under the same conditions but for the workers, percent."""
    if qps.empty:
        return qps
    frame = qps.assign(family=qps["conditions"].str.replace(r"^\d+ ", "", regex=True))
    base = frame[frame["workers"] == base_workers][["family", "label", "value"]]
    joined = frame[frame["workers"] != base_workers].merge(base, on=["family", "label"], suffixes=("", "_base"))
    for name in ("low", "value", "high"):
        joined[name] = joined[name] / joined["workers"] / (joined["value_base"] / base_workers) * 100
    return joined.assign(metric="scaling")[qps.columns]


def side_by_side(
    name: str, title: str, caption: str, cells: pd.DataFrame, metrics: Sequence[Metric], workers: bool = False
) -> Table:
    """A table: a row per metric (and number of workers) and method; published, simulated, error, then a column per
    measured setting. No column mixes kinds."""
    order = {metric.title: i for i, metric in enumerate(metrics)}
    digits = {metric.title: metric.digits for metric in metrics}
    cells = _with_errors(cells)
    cells = cells.assign(
        _metric=cells["metric"].map(order), _row=cells["label"].map(order_of), _kind=cells["kind"].map(_KINDS.index)
    )
    cells = cells.sort_values(
        ["_metric", "workers", "_row", "_kind", "conditions"]
        if workers
        else ["_metric", "_row", "_kind", "conditions"],
        kind="stable",
    )
    cells = cells.drop(columns=["_metric", "_row", "_kind"]).reset_index(drop=True)
    keys = ["metric", "workers", "label"] if workers else ["metric", "label"]
    columns = list(dict.fromkeys(cells.loc[cells["kind"] == "measured", "conditions"].sort_values()))
    kinds = set(cells["kind"])
    rows = []
    for key, group in cells.groupby(keys, sort=False):
        values = dict(zip(keys, key if isinstance(key, tuple) else (key,), strict=True))
        unit = group["unit"].iloc[0]
        row = {"metric": f"{values['metric']} [{unit}]"} | ({"workers": f"{values['workers']:,}"} if workers else {})
        row["method"] = values["label"]
        for kind in ("published", "simulated"):
            if kind in kinds:
                row[kind] = _one(group[group["kind"] == kind], digits[values["metric"]])
        if {"published", "simulated"} <= kinds:
            pair = group[group["error_pct"].notna()]
            row["error %"] = f"{pair['error_pct'].iloc[0]:+.1f}" if len(pair) else NOTHING
            row["rounding ± %"] = f"{pair['floor_pct'].iloc[0]:.2f}" if len(pair) else NOTHING
        for condition in columns:
            here = group[(group["kind"] == "measured") & (group["conditions"] == condition)]
            text = _one(here, digits[values["metric"]])
            other = len(here) and here["unit"].iloc[0] != unit
            row[f"measured: {condition}"] = f"{text} {here['unit'].iloc[0]}" if other else text
        rows.append(row)
    return Table(name, title, caption, pd.DataFrame(rows).fillna(NOTHING).astype(str), cells[CELLS])


_KINDS = ["published", "simulated", "measured"]


def _with_errors(cells: pd.DataFrame) -> pd.DataFrame:
    """Simulated cells get their error against the published cell of the same metric, workers and method."""
    keys = ["metric", "workers", "label"]
    cells = cells.drop(columns=["error_pct", "floor_pct"]).merge(
        cells.loc[cells["kind"] == "published", [*keys, "value", "floor_pct"]].rename(columns={"value": "_published"}),
        on=keys,
        how="left",
    )
    simulated = cells["kind"] == "simulated"
    error = (cells["value"] / cells["_published"] - 1) * 100
    return cells.assign(
        error_pct=error.where(simulated), floor_pct=cells["floor_pct"].where(simulated & error.notna())
    ).drop(columns="_published")


def _one(cells: pd.DataFrame, digits: int) -> str:
    """A cell as it is shown: value, spread if any, mark of a published number that is not the paper's own."""
    if cells.empty:
        return NOTHING
    cell = cells.iloc[0]
    if cell["kind"] == "measured" and float(cell["value"]) >= 100:
        digits = min(digits, 1)
    text = shown(float(cell["value"]), digits)
    if cell["kind"] == "measured" and cell["n"] > 1:
        text += f" ({shown(float(cell['low']), digits)}-{shown(float(cell['high']), digits)})"
    mark = cell["mark"]
    return f"{text} [{mark}]" if isinstance(mark, str) and mark not in ("T", "") else text


def shown(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}"


def mismatches(table: Table, why: Callable[[str, int, str], str]) -> list[Mismatch]:
    """Simulated cells that are off by more than TOLERANCE_PCT and the rounding of the published number."""
    cells = table.cells
    far = cells[cells["error_pct"].abs() > TOLERANCE_PCT + cells["floor_pct"].fillna(0)]
    result = []
    for cell in far.itertuples():
        published = cells[
            (cells["kind"] == "published")
            & (cells["metric"] == cell.metric)
            & (cells["workers"] == cell.workers)
            & (cells["label"] == cell.label)
        ]
        printed = shown(float(published["value"].iloc[0]), 2)
        what = (
            f"{cell.label}, {cell.workers:,} workers: {cell.metric} published {printed} {cell.unit}, "
            f"simulated {shown(float(cell.value), 2)} ({cell.error_pct:+.1f} %)"
        )
        result.append(Mismatch(table.title, what, why(str(cell.metric), int(cell.workers), str(cell.label))))
    return result
