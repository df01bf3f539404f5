"""Records in, data frames out: one row per step, medians and spread per setting, ratios within a session.

A row belongs to a ``method``, ``clustered`` or not, under a ``setting``; settings that differ in nothing but the number
of workers are one ``family``. Labels come later (``results.frames.labels``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nestpipe.measurement.record import METRICS, Record
from results.frames.labels import PAPER_METHODS, conditions_of, family_conditions_of, is_clustered, only, pace_of
from results.published import Published

#: What may differ between methods that are compared, so belongs to no setting.
_NOT_SETTING = ("micro_batches", "clustering")
#: Same setting, measured longer or again.
_NOT_CONDITIONS = ("steps", "rounds", "evaluate")
#: For a value that a record of another version does not have.
_NOT_SAID = "not said"
#: The sizes that figures vary.
SIZES = ("embedding_dim", "dense_layers", "sequence_length")
_SETTING = ["setting", "family", "workers", "conditions", "family_conditions", "pace"]
_GROUP = [*_SETTING, "method", "clustered"]
_LONG = [*_GROUP, "metric", "value", "low", "high", "n"]
_FACTS = ["key", *_GROUP, "session", "micro_batch", "clustering", *SIZES]


def setting_of(record: Record) -> str:
    """Canonical text of the conditions that records have to share to be compared in one column."""
    return _canonical(record.workers, *_family(record))


def family_of(record: Record) -> str:
    """Canonical text of the setting without the number of workers."""
    return _canonical(*_family(record))


def session_of(record: Record) -> str:
    """Canonical text of what the records of one interleaved run share."""
    config = {name: value for name, value in record.config.items() if name != "micro_batches"}
    return _canonical(record.workers, record.testbed, record.paced, record.seed, config)


def _family(record: Record) -> tuple[str, bool, dict[str, Any]]:
    left_out = (*_NOT_SETTING, *_NOT_CONDITIONS)
    config = {name: value for name, value in record.config.items() if name not in left_out}
    return record.testbed, record.paced, config


def _canonical(*facts: Any) -> str:
    return json.dumps(facts, sort_keys=True, default=str)


def sizes_of(record: Record) -> dict[str, Any]:
    """Samples of a micro-batch, whether clustering is on or off, and the sizes of the model."""
    if record.kind == "simulated":
        model = record.config["workload"]
        batch = model.get("batch_size")
        on = not model.get("keys", {}).get("duplication")
    else:
        model = record.config["model"]
        batch = record.config["data"].get("batch_size")
        on = bool(record.config.get("clustering"))
    return {
        "micro_batch": batch and batch // record.config["micro_batches"],
        "clustering": "on" if on else "off",
        **{name: model.get(name) for name in SIZES},
    }


def step_frame(records: Iterable[Record]) -> pd.DataFrame:
    """One row per record and step, in the order given; a column per metric, NaN where it is absent.

    ``records``: of one kind, each once (``Sources.of``). The other columns: ``key``, ``method``, ``clustered``,
    ``workers``, ``setting``, ``family``, ``session``; ``conditions``, ``family_conditions`` and ``pace`` in words;
    ``micro_batch`` (samples), ``clustering`` and SIZES; ``step``, and ``round``, the interleaved round that the step
    belongs to (warm-up leaves a gap between two).
    """
    frames = []
    for record in records:
        steps = np.asarray(record.steps, dtype=np.int64)
        if not len(steps):
            continue
        values = {name: record.metrics[name] for name in METRICS if len(record.metrics.get(name, ())) == len(steps)}
        frame = pd.DataFrame(values, index=range(len(steps)), dtype="float64")
        rounds = np.concatenate([[0], np.cumsum(np.diff(steps) > 1)])
        frames.append(frame.assign(**_facts(record), step=steps, round=rounds))
    columns = [*_FACTS, "step", "round", *METRICS]
    if not frames:
        return pd.DataFrame(columns=columns)
    return pd.concat(frames, ignore_index=True).reindex(columns=columns)


def _facts(record: Record) -> dict[str, Any]:
    return {
        "key": record.key,
        "method": record.method,
        "clustered": is_clustered(record),
        "workers": record.workers,
        "setting": setting_of(record),
        "family": family_of(record),
        "session": session_of(record),
        "conditions": conditions_of(record),
        "family_conditions": family_conditions_of(record),
        "pace": pace_of(record),
        **sizes_of(record),
    }


def told_apart(steps: pd.DataFrame) -> pd.DataFrame:
    """``steps`` with conditions that name one family each: if two read alike, what differs between them is added.

    A store that holds a run of another size next to the first (``--size tiny``, then full) has such families.
    """
    more: dict[str, str] = {}
    for _, alike in steps.drop_duplicates("family").groupby("family_conditions", sort=True):
        flat = {text: dict(_flat("", json.loads(text)[-1])) for text in alike["family"]}
        keys = sorted({key for one in flat.values() for key in one})
        differ = [key for key in keys if len({str(one.get(key)) for one in flat.values()}) > 1]
        for text, one in flat.items():
            more[text] = "".join(f", {key} {one.get(key, _NOT_SAID)}" for key in differ)
    added = steps["family"].map(more)
    return steps.assign(conditions=steps["conditions"] + added, family_conditions=steps["family_conditions"] + added)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Nested settings by the last part of their name, which is an option's."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    for inner, below in value.items():
        yield from _flat(inner, below)


def medians(steps: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Long form, a row per setting, method and metric: ``value`` (median), ``low``, ``high`` (quartiles), ``n``."""
    if steps.empty:
        return pd.DataFrame(columns=_LONG)
    long = steps.melt(id_vars=_GROUP, value_vars=list(metrics), var_name="metric", value_name="x").dropna(subset="x")
    grouped = long.groupby([*_GROUP, "metric"], sort=True)["x"]
    result = grouped.quantile([0.25, 0.5, 0.75]).unstack()
    result.columns = pd.Index(["low", "value", "high"])
    return result.assign(n=grouped.size()).reset_index()


def ratios(steps: pd.DataFrame, base: str, metric: str = "step_ms") -> pd.DataFrame:
    """How many times the method ``base``'s ``metric`` is each method's, both within one session and round.

    Long form as ``medians``, ``metric`` "speedup": median over rounds, with the smallest and the largest.
    """
    if only(steps, base).empty:
        return pd.DataFrame(columns=_LONG)
    keys = [*_SETTING, "session", "round"]
    rounds = steps.groupby([*keys, "method", "clustered"], sort=True)[metric].median().reset_index()
    bases = only(rounds, base).drop(columns=["method", "clustered"])
    joined = rounds.merge(bases, on=keys, suffixes=("", "_base"))
    joined["x"] = joined[f"{metric}_base"] / joined[metric]
    grouped = joined.groupby(_GROUP, sort=True)["x"]
    result = grouped.agg(low="min", value="median", high="max", n="size").reset_index()
    return result.assign(metric="speedup")


def measured_medians(steps: pd.DataFrame) -> pd.DataFrame:
    """One row per setting and method of measured steps: medians over steps by metric, parts and shares of a step."""
    long = medians(steps, METRICS)
    if long.empty:
        return pd.DataFrame()
    wide = long.pivot(index=_GROUP, columns="metric", values="value").reset_index()
    row = ["setting", "method", "clustered"]
    sizes = steps.drop_duplicates(row)[[*row, "micro_batch", "clustering", *SIZES]]
    return _with_parts(wide.merge(sizes, on=row, how="left"))


def simulated_means(records: Iterable[Record]) -> pd.DataFrame:
    """One row per simulated record: means over its steps by metric, parts and shares of a step, and its sizes."""
    rows = [
        {
            "method": record.method,
            "clustered": False,
            "workers": record.workers,
            "conditions": conditions_of(record),
            **sizes_of(record),
            **{name: float(np.mean(values)) for name, values in record.metrics.items() if len(values)},
        }
        for record in records
        if record.kind == "simulated"
    ]
    return _with_parts(pd.DataFrame(rows))


def _with_parts(frame: pd.DataFrame) -> pd.DataFrame:
    """``rest_ms``: what a step holds besides dense, update, exposed lookup and communication; shares in percent."""
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


def published_frame(rows: Iterable[Published]) -> pd.DataFrame:
    """The published numbers; ``paper_method``: as the paper calls it; ``method``: the method that stands for it."""
    frame = pd.DataFrame([vars(row) for row in rows]).rename(columns={"method": "paper_method"})
    return frame.assign(method=frame["paper_method"].map(PAPER_METHODS), clustered=False)
