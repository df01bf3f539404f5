"""What figures plot, taken from records: shares and parts of a step, per method and setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from nestpipe.measurement.record import METRICS, Record
from results.artefacts import Table, distinct
from results.frames.frames import describe, label_of, medians, order_of, step_frame
from results.frames.side_by_side import CELLS, HALF_UNIT, NOTHING, shown

TIMES = tuple(name for name in METRICS if name.endswith("_ms"))


def simulated_means(records: Iterable[Record]) -> pd.DataFrame:
    """One row per simulated record: means over its steps by metric, with label, workers and micro-batch size."""
    rows = []
    for record in distinct(records):
        if record.kind != "simulated":
            continue
        workload = record.config["workload"]
        facts = {
            "label": label_of(record),
            "workers": record.workers,
            "conditions": describe(record),
            "micro_batch": workload["batch_size"] // record.config["micro_batches"],
            "clustering": "off" if workload["keys"]["duplication"] else "on",
            **{name: workload[name] for name in ("embedding_dim", "dense_layers", "sequence_length")},
        }
        rows.append(facts | {name: float(np.mean(v)) for name, v in record.metrics.items() if len(v)})
    return _with_parts(pd.DataFrame(rows))


def measured_medians(records: Iterable[Record]) -> pd.DataFrame:
    """One row per setting and method of the measured records: medians over steps by metric."""
    kept = [r for r in distinct(records) if r.kind == "measured"]
    long = medians(step_frame(kept), METRICS)
    if long.empty:
        return pd.DataFrame()
    index = ["setting", "conditions", "workers", "label"]
    wide = long.pivot(index=index, columns="metric", values="value").reset_index()
    sizes = pd.DataFrame(
        [
            {
                "setting": setting_text,
                "label": label_of(r),
                "micro_batch": r.config["data"]["batch_size"] // r.config["micro_batches"],
                "clustering": "on" if r.config.get("clustering") else "off",
                **{name: r.config["model"][name] for name in ("embedding_dim", "dense_layers", "sequence_length")},
            }
            for r, setting_text in zip(kept, _settings(kept), strict=True)
        ]
    ).drop_duplicates(["setting", "label"])
    return _with_parts(wide.merge(sizes, on=["setting", "label"], how="left"))


def _settings(records: Sequence[Record]) -> list[str]:
    from results.frames.frames import setting_of

    return [setting_of(r) for r in records]


def _with_parts(frame: pd.DataFrame) -> pd.DataFrame:
    """``rest_ms``: what a step holds beside dense, update, exposed lookup and communication; shares in percent."""
    if frame.empty:
        return frame
    named = frame[["dense_ms", "update_ms", "exposed_lookup_ms", "exposed_communication_ms"]].sum(axis=1)
    return frame.assign(
        rest_ms=(frame["step_ms"] - named).clip(lower=0.0),
        lookup_share=frame["exposed_lookup_ms"] / frame["step_ms"] * 100,
        comm_share=frame["exposed_communication_ms"] / frame["step_ms"] * 100,
        exposed_pct=frame["exposed_communication_ms"] / frame["communication_ms"] * 100,
        utilisation_pct=frame["dense_ms"] / frame["step_ms"] * 100,
    )


def in_order(labels: Iterable[str]) -> list[str]:
    return sorted(set(labels), key=order_of)


def comparison(name: str, title: str, caption: str, rows: Sequence[Mapping[str, object]]) -> Table:
    """A table of single quantities. ``rows``: quantity, workers, label, unit, mark, published, simulated, measured
    (absent: there is none), ``digits``, ``conditions``."""
    shown_rows, cells = [], []
    for row in rows:
        digits = int(str(row.get("digits", 2)))
        values = {kind: row.get(kind) for kind in ("published", "simulated", "measured")}
        pair = values["published"] is not None and values["simulated"] is not None
        error = (_number(values["simulated"]) / _number(values["published"]) - 1) * 100 if pair else None
        floor = HALF_UNIT / _number(values["published"]) * 100 if pair else None
        mark = str(row.get("mark") or "")
        line = {"quantity": str(row["quantity"]), "method": str(row["label"])}
        for kind, value in values.items():
            text = NOTHING if value is None else shown(_number(value), digits)
            line[kind] = f"{text} [{mark}]" if kind == "published" and value is not None and mark else text
        line["error %"] = NOTHING if error is None else f"{error:+.1f}"
        shown_rows.append(line | {"unit": str(row["unit"])})
        cells += [
            {
                "metric": row["quantity"],
                "workers": row.get("workers"),
                "label": row["label"],
                "kind": kind,
                "conditions": row.get("conditions", ""),
                "value": value,
                "unit": row["unit"],
                "mark": mark if kind == "published" else "",
                "error_pct": error if kind == "simulated" else None,
                "floor_pct": floor if kind == "simulated" else None,
            }
            for kind, value in values.items()
            if value is not None
        ]
    frame = pd.DataFrame(shown_rows)
    empty = [kind for kind in ("published", "simulated", "measured") if len(frame) and (frame[kind] == NOTHING).all()]
    return Table(name, title, caption, frame.drop(columns=empty), pd.DataFrame(cells, columns=CELLS))


def _number(value: object) -> float:
    return float(str(value))
