"""The ladder serial -> +DBP -> +FWP -> +clustering, and NestPipe against its baselines, as ratios with spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pandas as pd

from results.artefacts import Artefact, Mismatch, Table
from results.experiments.part_names import NPU, TWO
from results.frames.frames import medians, ratios
from results.frames.labels import Variant, in_order, label_of, only, order_of, variants
from results.sources import Sources
from results.tables.side_by_side import CELLS, NOTHING, rendered, shown

#: Each rung and what it adds.
RUNGS = {
    Variant("serial"): "serial",
    Variant("dbp-only"): "+DBP",
    Variant("nestpipe"): "+FWP",
    Variant("nestpipe", clustered=True): "+clustering",
}
#: What NestPipe's speed-up is over.
BASES = ("serial", "serial(8)", "torchrec", "torchrec-dedup")
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


def ladder(sources: Sources) -> Artefact:
    """Each technique added in turn; then NestPipe's speed-up over every baseline, per round."""
    steps = sources.steps(TWO)
    tables = [*_ladder_tables(steps), *_ratio_tables(steps), _simulated(sources)]
    return Artefact(
        "ladder",
        "The ladder: serial, +DBP, +FWP, +clustering (RQ1)",
        tuple(table for table in tables if len(table.frame)),
        mismatches=tuple(out_of_order(steps, tuple(RUNGS), "Ladder, measured", RUNGS)),
        missing=sources.missing(TWO, NPU),
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
    gains = ratios(steps, "serial")
    for i, (conditions, group) in enumerate(values.groupby("conditions", sort=True)):
        rows, last = [], None
        mine = gains[gains["conditions"] == conditions]
        for rung, name in RUNGS.items():
            cells = only(group, *rung).set_index("metric")
            if cells.empty:
                continue
            row = {"rung": name, "method": label_of(rung)}
            for metric, title in _METRICS.items():
                scale = 1e6 if metric == "embedding_bytes" else 1.0
                row[title] = shown(cells.loc[metric, "value"] / scale, 2) if metric in cells.index else NOTHING
            gain = only(mine, *rung)
            row["speed-up over serial"] = _ratio(gain)
            now = float(gain["value"].iloc[0]) if len(gain) else None
            row["over the rung before"] = NOTHING if now is None or last is None else f"{now / last:.2f}"
            last = now or last
            rows.append(row)
        caption = (
            f"Measured: {conditions}. Medians over steps; speed-up: median over interleaved rounds (range), within one "
            "run. +clustering ran with serial in a run of its own, and is compared within it."
        )
        cells = pd.concat([group, mine.assign(metric="speed-up over serial")]) if len(mine) else group
        cells = cells[[variant in RUNGS for variant in variants(cells)]]
        tables.append(Table(f"ladder-{i + 1}", f"Ladder, {conditions}", caption, pd.DataFrame(rows), _sorted(cells)))
    return tables


def _ratio_tables(steps: pd.DataFrame) -> list[Table]:
    """NestPipe and its forms against each baseline, a table per setting."""
    tables = []
    per_base = {Variant(base): ratios(steps, base) for base in BASES}
    found = in_order(variants(steps))
    for i, condition in enumerate(sorted(set(steps["conditions"]))):
        rows = []
        here = {base: frame[frame["conditions"] == condition] for base, frame in per_base.items()}
        here = {base: frame for base, frame in here.items() if len(frame)}
        for variant in found:
            texts = {f"over {label_of(base)}": _ratio(only(frame, *variant)) for base, frame in here.items()}
            if set(texts.values()) - {NOTHING}:
                rows.append({"method": label_of(variant), **texts})
        cells = [_sorted(frame.assign(metric=f"speed-up over {label_of(base)}")) for base, frame in here.items()]
        caption = (
            f"Measured: {condition}. How many times faster a step is: median over interleaved rounds (range). Real "
            "torchrec's exchanges go through gloo's all_to_all_single, nearly half-duplex over shaped links; its index "
            "deduplication needs a CPU kernel that fbgemm lacks, ours."
        )
        shown_rows = pd.DataFrame(rows).fillna(NOTHING)
        whole = pd.concat(cells, ignore_index=True) if cells else pd.DataFrame(columns=CELLS)
        tables.append(Table(f"ratios-{i + 1}", f"Speed-ups, {condition}", caption, shown_rows, whole))
    return tables


def _ratio(row: pd.DataFrame) -> str:
    """``row``: one row of ``ratios``, or none."""
    if row.empty:
        return NOTHING
    ratio = row.iloc[0]
    text = f"{ratio['value']:.2f}"
    return text if ratio["n"] < 2 else f"{text} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def _sorted(cells: pd.DataFrame) -> pd.DataFrame:
    """Rows of the CSV file, by metric and method."""
    order = [order_of(variant) for variant in variants(cells)]
    return rendered(cells.assign(kind="measured", _row=order).sort_values(["metric", "_row"], kind="stable"))


def _simulated(sources: Sources) -> Table:
    """The ladder on 1,536 virtual workers; the profile has clustering on, so it ends with +FWP."""
    frame = sources.simulated_means(NPU)
    rows, cells = [], []
    if len(frame):
        wide = frame[frame["workers"] == 1536]
        base = only(wide, "serial")
        for rung, name in zip(RUNGS, ("serial", "+DBP", "+FWP and clustering"), strict=False):
            mine = only(wide, *rung)
            if mine.empty or base.empty:
                continue
            step = float(mine["step_ms"].iloc[0])
            speedup = float(base["step_ms"].iloc[0]) / step
            rows.append(
                {
                    "rung": name,
                    "method": label_of(rung),
                    "step [ms]": shown(step, 2),
                    "speed-up over serial": f"{speedup:.2f}",
                }
            )
            facts = {"metric": "step", "value": step, "unit": "ms", "kind": "simulated"}
            cells.append(mine[["workers", "method", "clustered", "conditions"]].assign(**facts))
    caption = "Simulated: profile npu-1536-industrial."
    whole = rendered(pd.concat(cells)) if cells else pd.DataFrame(columns=CELLS)
    return Table("ladder-simulated", "Ladder, simulated, 1,536 workers", caption, pd.DataFrame(rows), whole)


def out_of_order(
    steps: pd.DataFrame, expected: Sequence[Variant], where: str, names: Mapping[Variant, str] | None = None
) -> list[Mismatch]:
    """Measured methods that are slower than the one before them in ``expected``, with the part of the step that grew.

    ``names``: what each is called in the sentence (default: its label). Speed-ups are over serial, within a session,
    so that only methods that ran next to it are compared.
    """
    found = []
    gains = ratios(steps, "serial")
    parts = medians(steps, [*_GROWN])
    for conditions, group in gains.groupby("conditions", sort=True):
        gain = dict(zip(variants(group), group.to_dict("records"), strict=True))
        here = parts[parts["conditions"] == conditions]
        present = [variant for variant in expected if variant in gain]
        for before, after in pairwise(present):
            slow, fast = gain[after], gain[before]
            if slow["value"] > fast["value"]:
                continue
            title = {variant: names[variant] if names else label_of(variant) for variant in (before, after)}
            what = (
                f"{conditions}: {title[after]} gives {slow['value']:.2f}x over serial, "
                f"{title[before]} {fast['value']:.2f}x"
            )
            why = _what_grew(only(here, *before), only(here, *after))
            if slow["high"] >= fast["low"] and slow["n"] > 1:
                why += " Their ranges over rounds overlap: it may be noise."
            found.append(Mismatch(where, what, why))
    return found


def _what_grew(before: pd.DataFrame, after: pd.DataFrame) -> str:
    """The part of a step that is most longer in ``after``, and what is known of it. Both: ``medians`` of one method."""
    grew = (after.set_index("metric")["value"] - before.set_index("metric")["value"]).sort_values(ascending=False)
    name, by = str(grew.index[0]), float(grew.iloc[0])
    words = name.removesuffix("_ms").replace("_", " ")
    return f"Largest growth from the one to the other: {words}, by {by:.1f} ms. {_GROWN[name]}".rstrip()
