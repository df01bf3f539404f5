"""Numbers of the three kinds put side by side, each in its own column, with the error per cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from nestpipe.measurement.record import Record
from results.artefacts import Mismatch, Table
from results.frames.frames import medians, ratios
from results.frames.labels import Variant, conditions_of, label_of, labelled, order_of, variants

_NUMBER = ["kind", "conditions", "value", "low", "high", "n", "unit", "mark", "error_pct", "floor_pct"]
#: Columns of the CSV files, a row per number. ``low``, ``high``: quartiles over steps, or the range over rounds for a
#: speed-up; ``error_pct``: of a simulated number against the published; ``floor_pct``: what its rounding allows.
CELLS = ["metric", "workers", "label", *_NUMBER]
#: The same before it is rendered.
_CELLS = ["metric", "workers", "method", "clustered", *_NUMBER]
#: In the order of the columns.
_KINDS = ["published", "simulated", "measured"]
#: Published numbers have two decimals.
HALF_UNIT = 0.005
#: What a cell shows that this machine, or the paper, cannot fill.
NOTHING = "-"
#: A simulated cell counts as not matching beyond this and the published cell's rounding, percent.
TOLERANCE_PCT = 2.0


@dataclass(frozen=True)
class Metric:
    """``published``: its name in published.csv; ``digits``: decimals shown; ``measured``: metric of a record (or
    "speedup"), None if measured runs have none; ``scale``: divides a simulated value into the published unit."""

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
#: Table II and Table IV call it differently.
COMMUNICATION = Metric(
    "exposed communication", "comm", "ms", 2, "exposed_communication_ms", lambda m: m["exposed_communication_ms"]
)
EXPOSED_COMMUNICATION = replace(COMMUNICATION, published="exposed_comm")
TOTAL = Metric("total communication", "total_comm", "ms", 2, "communication_ms", lambda m: m["communication_ms"])
QPS = Metric("QPS", "qps", "1e5/s", 2, "qps", lambda m: m["qps"], 1e5, "samples/s")
SCALING = Metric("scaling efficiency", "scaling", "%", 2, "scaling", lambda m: m["scaling"])


def simulated_cells(
    records: Sequence[Record], metrics: Sequence[Metric], base_workers: int | None = None
) -> pd.DataFrame:
    """A row per record and metric: means over the steps, speed-up over serial, efficiency against ``base_workers``."""
    rows = []
    kept = [r for r in records if r.kind == "simulated"]
    means = {(r.workers, r.method): {name: float(np.mean(v)) for name, v in r.metrics.items() if len(v)} for r in kept}
    for record in kept:
        mean = dict(means[record.workers, record.method])
        serial = means.get((record.workers, "serial"))
        if serial:
            mean["speedup"] = serial["step_ms"] / mean["step_ms"]
        base = means.get((base_workers, record.method)) if base_workers else None
        if base and base_workers and record.workers != base_workers:
            mean["scaling"] = mean["qps"] / record.workers / (base["qps"] / base_workers) * 100
        for metric in metrics:
            try:
                value = metric.simulated(mean) / metric.scale
            except KeyError:
                continue
            rows.append(
                {
                    "metric": metric.title,
                    "workers": record.workers,
                    "method": record.method,
                    "clustered": False,
                    "kind": "simulated",
                    "conditions": conditions_of(record),
                    "value": value,
                    "unit": metric.unit,
                }
            )
    return pd.DataFrame(rows, columns=_CELLS)


def published_cells(published: pd.DataFrame, metrics: Sequence[Metric]) -> pd.DataFrame:
    """The rows of ``results.frames.frames.published_frame`` that belong to ``metrics``."""
    titles = {metric.published: metric.title for metric in metrics}
    frame = published[published["metric"].isin(titles)]
    return frame.assign(
        metric=frame["metric"].map(titles),
        kind="published",
        conditions=frame["cluster"] + ", " + frame["dataset"],
        floor_pct=HALF_UNIT / frame["value"] * 100,
    ).reindex(columns=_CELLS)


def measured_cells(
    steps: pd.DataFrame, metrics: Sequence[Metric], base_workers: int | None = None, conditions: str = "conditions"
) -> pd.DataFrame:
    """Medians over steps and spread, per setting; speed-up over serial within a session.

    ``conditions``: the column of ``steps`` that names the conditions.
    """
    names = {m.measured: m for m in metrics if m.measured}
    plain = [name for name in names if name not in ("speedup", "scaling")]
    frames = [medians(steps, plain)]
    if "speedup" in names:
        frames.append(ratios(steps, "serial"))
    if "scaling" in names and base_workers:
        frames.append(_scaling(medians(steps, ["qps"]), base_workers))
    frame = pd.concat([f for f in frames if len(f)] or frames[:1], ignore_index=True)
    units = {m.title: m.measured_unit or m.unit for m in metrics}
    frame["metric"] = frame["metric"].map({name: m.title for name, m in names.items()})
    unit = frame["metric"].map(units)
    return frame.assign(kind="measured", unit=unit, conditions=frame[conditions]).reindex(columns=_CELLS)


def _scaling(qps: pd.DataFrame, base_workers: int) -> pd.DataFrame:
    """QPS per worker against that of ``base_workers`` in the same family of settings, percent."""
    if qps.empty:
        return qps
    row = ["family", "method", "clustered"]
    base = qps[qps["workers"] == base_workers][[*row, "value"]]
    joined = qps[qps["workers"] != base_workers].merge(base, on=row, suffixes=("", "_base"))
    for name in ("low", "value", "high"):
        joined[name] = joined[name] / joined["workers"] / (joined["value_base"] / base_workers) * 100
    return joined.assign(metric="scaling")[qps.columns]


def joined(*cells: pd.DataFrame) -> pd.DataFrame:
    """All rows of cells of several kinds."""
    filled = [frame.dropna(axis=1, how="all") for frame in cells if len(frame)]
    return pd.concat(filled, ignore_index=True).reindex(columns=_CELLS)


def compared(cells: pd.DataFrame, metrics: Sequence[Metric], workers: bool = False) -> pd.DataFrame:
    """``cells`` in the order of a table, by metric (and number of ``workers``), method and kind.

    Simulated cells get their error against the published cell of the same metric, workers and method.
    """
    keys = ["metric", "workers", "method", "clustered"]
    published = cells.loc[cells["kind"] == "published", [*keys, "value", "floor_pct"]]
    cells = cells.drop(columns=["error_pct", "floor_pct"]).merge(
        published.rename(columns={"value": "_published"}), on=keys, how="left"
    )
    simulated = cells["kind"] == "simulated"
    error = (cells["value"] / cells["_published"] - 1) * 100
    order = {metric.title: i for i, metric in enumerate(metrics)}
    cells = cells.assign(
        error_pct=error.where(simulated),
        floor_pct=cells["floor_pct"].where(simulated & error.notna()),
        _metric=cells["metric"].map(order),
        _row=[order_of(variant) for variant in variants(cells)],
        _kind=cells["kind"].map(_KINDS.index),
    )
    by = ["_metric", *(["workers"] if workers else []), "_row", "_kind", "conditions"]
    return cells.sort_values(by, kind="stable").reset_index(drop=True)[_CELLS]


def side_by_side(
    name: str, title: str, caption: str, cells: pd.DataFrame, metrics: Sequence[Metric], workers: bool = False
) -> Table:
    """``compared`` cells as a table: a row per metric (and number of workers) and method; published, simulated, error,
    then a column per measured setting. No column mixes kinds."""
    digits = {metric.title: metric.digits for metric in metrics}
    conditions = list(dict.fromkeys(cells.loc[cells["kind"] == "measured", "conditions"].sort_values()))
    kinds = set(cells["kind"])
    rows = []
    keys = ["metric", *(["workers"] if workers else []), "method", "clustered"]
    for key, group in cells.groupby(keys, sort=False):
        values = dict(zip(keys, key, strict=True))
        unit = group["unit"].iloc[0]
        row = {"metric": f"{values['metric']} [{unit}]"} | ({"workers": f"{values['workers']:,}"} if workers else {})
        row["method"] = label_of(Variant(values["method"], values["clustered"]))
        for kind in ("published", "simulated"):
            if kind in kinds:
                row[kind] = _one(group[group["kind"] == kind], digits[values["metric"]])
        if {"published", "simulated"} <= kinds:
            pair = group[group["error_pct"].notna()]
            row["error %"] = f"{pair['error_pct'].iloc[0]:+.1f}" if len(pair) else NOTHING
            row["rounding ± %"] = f"{pair['floor_pct'].iloc[0]:.2f}" if len(pair) else NOTHING
        for condition in conditions:
            here = group[(group["kind"] == "measured") & (group["conditions"] == condition)]
            text = _one(here, digits[values["metric"]])
            other = len(here) and here["unit"].iloc[0] != unit
            row[f"measured: {condition}"] = f"{text} {here['unit'].iloc[0]}" if other else text
        rows.append(row)
    return Table(name, title, caption, pd.DataFrame(rows).fillna(NOTHING).astype(str), rendered(cells))


def rendered(cells: pd.DataFrame) -> pd.DataFrame:
    """``cells`` as the CSV file has them: with the label of each row."""
    return labelled(cells).reindex(columns=CELLS)


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


def mismatches(title: str, cells: pd.DataFrame, why: Callable[[str, str], str]) -> list[Mismatch]:
    """Of the ``compared`` cells of table ``title``, simulated ones that are off by more than TOLERANCE_PCT and the
    rounding of the published number. ``why``: (metric, method) -> the reason."""
    far = cells[cells["error_pct"].abs() > TOLERANCE_PCT + cells["floor_pct"].fillna(0)]
    result = []
    for cell in far.itertuples():
        published = cells[
            (cells["kind"] == "published")
            & (cells["metric"] == cell.metric)
            & (cells["workers"] == cell.workers)
            & (cells["method"] == cell.method)
        ]
        printed = shown(float(published["value"].iloc[0]), 2)
        what = (
            f"{label_of(Variant(str(cell.method)))}, {cell.workers:,} workers: {cell.metric} published {printed} "
            f"{cell.unit}, simulated {shown(float(cell.value), 2)} ({cell.error_pct:+.1f} %)"
        )
        result.append(Mismatch(title, what, why(str(cell.metric), str(cell.method))))
    return result
