"""The ladder serial -> +DBP -> +FWP -> +clustering, and NestPipe against its baselines, as ratios with spread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pandas as pd

from nestpipe.measurement.record import Record
from results.artefacts import NPU, TWO, Artefact, Mismatch, Sources, Table, distinct
from results.frames.frames import LABELS, label_of, medians, order_of, ratios, step_frame, told_apart
from results.frames.series import simulated_means
from results.frames.side_by_side import CELLS, NOTHING, shown

RUNGS = ("TorchRec (serial)", "DBP-only", "NestPipe", "NestPipe + clustering")
NAMES = ("serial", "+DBP", "+FWP", "+clustering")
BASES = ("TorchRec (serial)", "serial(8)", LABELS["torchrec"], LABELS["torchrec-dedup"])


def ladder(sources: Sources) -> Artefact:
    """Each technique added in turn; then NestPipe's speed-up over every baseline, per round."""
    records = [r for r in sources.of(TWO) if r.kind == "measured"]
    steps = told_apart(step_frame(records))
    tables = [*_ladder_tables(steps), *_ratio_tables(records, steps), _simulated(sources)]
    return Artefact(
        "ladder",
        "The ladder: serial, +DBP, +FWP, +clustering (RQ1)",
        tuple(table for table in tables if len(table.frame)),
        mismatches=tuple(out_of_order(steps, RUNGS, NAMES, "Ladder, measured")),
        missing=tuple(part for part in (TWO, NPU) if not sources.of(part)),
    )


_METRICS = {
    "step_ms": "step [ms]",
    "exposed_lookup_ms": "exposed lookup [ms]",
    "exposed_communication_ms": "exposed comm. [ms]",
    "communication_ms": "total comm. [ms]",
    "embedding_bytes": "embedding MB",
}


def _ladder_tables(steps: pd.DataFrame) -> list[Table]:
    """One table per setting."""
    tables = []
    values = medians(steps, list(_METRICS))
    gains = ratios(steps, RUNGS[0])
    for i, (conditions, group) in enumerate(values.groupby("conditions", sort=True)):
        rows, last = [], None
        mine = gains[gains["conditions"] == conditions].set_index("label")
        for rung, name in zip(RUNGS, NAMES, strict=True):
            cells = group[group["label"] == rung].set_index("metric")
            if cells.empty:
                continue
            row = {"rung": name, "method": rung}
            for metric, title in _METRICS.items():
                scale = 1e6 if metric == "embedding_bytes" else 1.0
                row[title] = shown(cells.loc[metric, "value"] / scale, 2) if metric in cells.index else NOTHING
            row["speed-up over serial"] = _ratio(mine, rung)
            now = float(mine.loc[rung, "value"]) if rung in mine.index else None
            row["over the rung before"] = NOTHING if now is None or last is None else f"{now / last:.2f}"
            last = now or last
            rows.append(row)
        caption = (
            f"Measured: {conditions}. Medians over steps; speed-up: median over interleaved rounds (range), within one "
            "run. +clustering ran with serial in a run of its own, and is compared within it."
        )
        cells = _cells(pd.concat([group, mine.reset_index()]) if len(mine) else group, RUNGS)
        tables.append(Table(f"ladder-{i + 1}", f"Ladder, {conditions}", caption, pd.DataFrame(rows), cells))
    return tables


def _ratio_tables(records: list[Record], steps: pd.DataFrame) -> list[Table]:
    """NestPipe and its forms against each baseline, a table per setting."""
    tables = []
    per_base = {base: ratios(steps, base) for base in BASES}
    conditions = sorted(set(steps["conditions"]))
    labels = sorted({label_of(r) for r in distinct(records)}, key=order_of)
    for i, condition in enumerate(conditions):
        rows, cells = [], []
        here = {b: f[f["conditions"] == condition].set_index("label") for b, f in per_base.items() if len(f)}
        for label in labels:
            texts = {f"over {base}": _ratio(frame, label) for base, frame in here.items() if len(frame)}
            if set(texts.values()) - {NOTHING}:
                rows.append({"method": label, **texts})
        for base, frame in here.items():
            if len(frame):
                cells.append(_cells(frame.reset_index().assign(metric=f"speed-up over {base}"), None))
        caption = (
            f"Measured: {condition}. How many times faster a step is: median over interleaved rounds (range). Real "
            "torchrec's exchanges go through gloo's all_to_all_single, nearly half-duplex over shaped links; its index "
            "deduplication needs a CPU kernel that fbgemm lacks, ours."
        )
        frame = pd.DataFrame(rows).fillna(NOTHING)
        joined = pd.concat(cells, ignore_index=True) if cells else pd.DataFrame(columns=CELLS)
        tables.append(Table(f"ratios-{i + 1}", f"Speed-ups, {condition}", caption, frame, joined))
    return tables


def _ratio(frame: pd.DataFrame, label: str) -> str:
    if label not in frame.index:
        return NOTHING
    row = frame.loc[label]
    text = f"{row['value']:.2f}"
    return text if row["n"] < 2 else f"{text} ({row['low']:.2f}-{row['high']:.2f})"


def _cells(frame: pd.DataFrame, labels: tuple[str, ...] | None) -> pd.DataFrame:
    kept = frame if labels is None else frame[frame["label"].isin(labels)]
    kept = kept.assign(
        kind="measured",
        metric=kept["metric"].replace("speedup", "speed-up over serial"),
        _row=kept["label"].map(order_of),
    )
    return kept.sort_values(["metric", "_row"], kind="stable").reindex(columns=CELLS)


def _simulated(sources: Sources) -> Table:
    """The ladder on 1,536 virtual workers; the profile has clustering on, so it ends with +FWP."""
    frame = simulated_means(sources.of(NPU))
    rows, cells = [], []
    if len(frame):
        frame = frame[(frame["workers"] == 1536) & frame["label"].isin(RUNGS)].set_index("label")
        for rung, name in zip(RUNGS[:3], ("serial", "+DBP", "+FWP and clustering"), strict=True):
            if rung not in frame.index or RUNGS[0] not in frame.index:
                continue
            step, base = float(frame.loc[rung, "step_ms"]), float(frame.loc[RUNGS[0], "step_ms"])
            rows.append(
                {
                    "rung": name,
                    "method": rung,
                    "step [ms]": shown(step, 2),
                    "speed-up over serial": f"{base / step:.2f}",
                }
            )
            facts = {"workers": 1536, "label": rung, "kind": "simulated", "conditions": frame.loc[rung, "conditions"]}
            cells.append({"metric": "step", "value": step, "unit": "ms", **facts})
    caption = "Simulated: profile npu-1536-industrial."
    return Table(
        "ladder-simulated",
        "Ladder, simulated, 1,536 workers",
        caption,
        pd.DataFrame(rows),
        pd.DataFrame(cells, columns=CELLS),
    )


def out_of_order(steps: pd.DataFrame, expected: Sequence[str], names: Sequence[str], where: str) -> list[Mismatch]:
    """Measured methods that are slower than the one before them in ``expected``, with the part of the step that grew.

    ``names``: what each is called in the sentence. Speed-ups are over serial, within a session, so that only methods
    that ran beside it are compared.
    """
    found = []
    gains = ratios(steps, RUNGS[0])
    parts = medians(steps, [*_GROWN])
    for conditions, group in gains.groupby("conditions", sort=True):
        at = group.set_index("label")
        value = at["value"]
        present = [label for label in expected if label in value.index]
        for before, after in pairwise(present):
            if value[after] > value[before]:
                continue
            here = parts[parts["conditions"] == conditions].pivot(index="metric", columns="label", values="value")
            grew = (here[after] - here[before]).sort_values(ascending=False)
            name, by = str(grew.index[0]), float(grew.iloc[0])
            title = dict(zip(expected, names, strict=True))
            what = (
                f"{conditions}: {title[after]} gives {value[after]:.2f}x over serial, "
                f"{title[before]} {value[before]:.2f}x"
            )
            words = name.removesuffix("_ms").replace("_", " ")
            why = f"Largest growth from the one to the other: {words}, by {by:.1f} ms. {_GROWN[name]}".rstrip()
            if at.loc[after, "high"] >= at.loc[before, "low"] and at.loc[after, "n"] > 1:
                why += " Their ranges over rounds overlap: it may be noise."
            found.append(Mismatch(where, what, why))
    return found


#: Parts of a step, and what is known of why they grow here.
_GROWN = {
    "dense_ms": "On few cores the dense math slows down beside data that moves, and by the cost of each micro-batch.",
    "update_ms": "",
    "exposed_lookup_ms": "",
    "exposed_communication_ms": "Each exchange costs its latency, and keys that micro-batches share travel again.",
    "exposed_dense_sync_ms": "",
    "skew_ms": "Ranks wait for each other: they share cores.",
    "other_ms": "Hand-offs between lanes, which share cores with the dense math.",
}
