"""Records that no part of the plan made: a sweep's, ``nestpipe run --store``'s or ``--json``'s, as one table a kind."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from nestpipe.measurement.record import Record
from results.artefacts import Artefact, Table
from results.experiments.plan import Options, all_parts
from results.frames.frames import medians, step_frame, told_apart
from results.frames.labels import Variant, label_of, labelled, order_of
from results.sources import Sources
from results.tables.side_by_side import CELLS, NOTHING

#: Metric of a record -> (heading, digits, factor).
_SHOWN = {
    "step_ms": ("step [ms]", 1, 1.0),
    "qps": ("samples/s", 0, 1.0),
    "exposed_lookup_ms": ("exposed lookup [ms]", 1, 1.0),
    "exposed_communication_ms": ("exposed communication [ms]", 1, 1.0),
    "exposed_communication_ratio": ("exposed communication ratio [%]", 0, 100.0),
    "utilisation": ("utilisation [%]", 0, 100.0),
}


def other_records(sources: Sources) -> Artefact:
    """Whatever is in stores that the plan does not know; without any, an artefact with nothing in it."""
    planned = {part.name for part in all_parts(Options())}
    records = sources.of(*(name for name in sources.parts if name not in planned))
    tables = [_table(kind, [r for r in records if r.kind == kind]) for kind in ("measured", "simulated")]
    return Artefact("records", "Further records", tuple(table for table in tables if table is not None))


def _table(kind: str, records: Sequence[Record]) -> Table | None:
    steps = step_frame(records)
    if steps.empty:
        return None
    if kind == "simulated":  # two that read alike differ in the model
        models = {r.key: _model(r) for r in records}
        conditions = steps["conditions"] + steps["key"].map(models)
        steps = steps.assign(conditions=conditions, setting=conditions, family=conditions)
    else:
        steps = told_apart(steps)
    cells = medians(steps, list(_SHOWN))
    rows = {}
    for (conditions, method, clustered), group in cells.groupby(["conditions", "method", "clustered"], sort=False):
        variant = Variant(method, clustered)
        row = {"conditions": conditions, "method": label_of(variant)}
        by = group.set_index("metric")
        for metric, (heading, digits, factor) in _SHOWN.items():
            row[heading] = NOTHING
            if metric in by.index:
                value, low, high = (float(x) * factor for x in by.loc[metric, ["value", "low", "high"]])
                spread = f" ({low:,.{digits}f}-{high:,.{digits}f})" if low != high else ""
                row[heading] = f"{value:,.{digits}f}{spread}"
        rows[conditions, order_of(variant)] = row
    caption = f"{kind.capitalize()}: medians over steps (quartiles), means over ranks."
    if kind == "measured":
        caption += " Methods that ran interleaved under the same conditions can be compared, others only roughly."
    return Table(
        f"records-{kind}",
        f"{len(records)} {kind} records that belong to no table of the paper",
        caption,
        pd.DataFrame([row for _, row in sorted(rows.items())]),
        labelled(cells).sort_values(["setting", "label", "metric"]).assign(kind=kind).reindex(columns=CELLS),
    )


def _model(record: Record) -> str:
    workload = record.config.get("workload", {})
    names = {"embedding_dim": "dim", "dense_layers": "layers", "sequence_length": "length", "batch_size": "batch"}
    words = [f"{short} {workload[name]}" for name, short in names.items() if name in workload]
    return "".join(f", {word}" for word in [*words, f"{record.config.get('micro_batches', 1)} micro-batches"])
