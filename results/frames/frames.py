"""Records in, data frames out: one row per step, medians and spread per setting, ratios within a session.

The outcome depends on the set of records alone, not on their order or on how often one is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nestpipe.measurement.record import METRICS, Record, RecordError, Store, record_from_json
from results.artefacts import Sources, distinct
from results.published import Published, load_published

#: Methods in the order of the tables, and what each row is called. serial is what the paper's numbers call TorchRec.
LABELS: Mapping[str, str] = {
    "serial": "TorchRec (serial)",
    "torchrec": "real torchrec",
    "torchrec-dedup": "real torchrec, index dedup",
    "torchrec-planner": "real torchrec, planner",
    "torchrec-bf16": "real torchrec, bf16",
    "2d-sp": "2D-SP",
    "uniemb": "UniEmb",
    "dbp-only": "DBP-only",
    "fwp-only": "FWP-only",
    "nestpipe": "NestPipe",
    "nestpipe+bf16": "NestPipe, bf16",
    "nestpipe+2d-sp": "NestPipe+2D-SP",
    "nestpipe+2d-sp-exact": "NestPipe+2D-SP, exact",
}
PAPER_LABELS: Mapping[str, str] = {
    "TorchRec": "TorchRec (serial)",
    **{label: label for label in ("2D-SP", "UniEmb", "DBP-only", "FWP-only", "NestPipe", "NestPipe+2D-SP")},
}
#: What may differ between methods that are compared, so belongs to no setting.
_NOT_SETTING = ("micro_batches", "clustering")
#: For a value that a record of another version does not have.
NOT_SAID = "not said"
#: Same setting, measured longer or again.
_NOT_CONDITIONS = ("steps", "rounds", "evaluate")


def read_parts(root: Path) -> tuple[dict[str, tuple[Record, ...]], list[str]]:
    """Records by part, and a sentence for each file that is none.

    ``root``: a folder with a store per part, one store, a JSON file of ``run`` or ``simulate --json``, or one of
    pytest-benchmark that the suites wrote. Raises RecordError where it is none of these.
    """
    if root.is_file():
        return _from_file(root), []
    parts, skipped = {}, []
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    if any(root.glob("*.json")):
        folders.insert(0, root)
    for folder in folders:
        records, bad = Store(folder).read()
        parts[folder.name] = tuple(records)
        skipped += [f"{folder.name}/{sentence}" for sentence in bad]
    return parts, skipped


def _from_file(path: Path) -> dict[str, tuple[Record, ...]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if alone := data.get("records") or list(data.get("methods", {}).values()):
            return {path.name: tuple(record_from_json(record, path.name) for record in alone)}
        entries = [b["extra_info"] for b in data["benchmarks"]]
    except RecordError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"{path}: holds no records: neither a folder of them, nor a file of run --json, nor one of pytest-benchmark"
        ) from error
    parts: dict[str, list[Record]] = {}
    for entry in entries:
        for part, record in entry.get("records", []):
            parts.setdefault(part, []).append(record_from_json(record, path.name))
    return {part: tuple(records) for part, records in parts.items()}


def sources_from(folder: Path, records: Path | None = None) -> Sources:
    """Everything under ``folder`` (records in ``records`` or its subfolder of that name). Raises RecordError."""
    if records is not None and not records.exists():
        raise RecordError(f"{records}: no such folder or file; correct --records")
    parts, skipped = read_parts(records or folder / "records")
    return Sources(parts, tuple(load_published()), folder, tuple(skipped))


def label_of(record: Record) -> str:
    """What the record's row is called."""
    plain = record.method.split("(")[0]
    label = LABELS.get(plain, plain)
    if record.method != plain:
        label = record.method if plain == "serial" else f"{label}({record.method.partition('(')[2]}"
    return f"{label} + clustering" if clustered(record) else label


def clustered(record: Record) -> bool:
    """Measured records: samples that share keys were put together."""
    return record.kind == "measured" and bool(record.config.get("clustering")) and record.config["micro_batches"] > 1


def order_of(label: str) -> tuple[int, str]:
    """Sort key: rows in the order of the paper, further methods after them."""
    known = list(LABELS.values())
    near = [i for i, name in enumerate(known) if label == name or label.startswith((f"{name}(", f"{name} +"))]
    if label.startswith("serial("):
        return 0, label
    return (near[-1] if near else len(known)), label


def setting_of(record: Record) -> str:
    """Canonical text of the conditions that records have to share to stand in one column."""
    left_out = (*_NOT_SETTING, *_NOT_CONDITIONS)
    config = {name: value for name, value in record.config.items() if name not in left_out}
    return json.dumps([record.workers, record.testbed, record.paced, config], sort_keys=True, default=str)


def session_of(record: Record) -> str:
    """Canonical text of what the records of one interleaved run share."""
    config = {name: value for name, value in record.config.items() if name != "micro_batches"}
    return json.dumps([record.workers, record.testbed, record.paced, record.seed, config], sort_keys=True, default=str)


def describe(record: Record) -> str:
    """The record's conditions in a few words, for a column's heading."""
    if record.kind == "simulated":
        return f"{record.config['hardware']}, {record.workers} workers"
    where = record.testbed
    if where.startswith("netns:"):
        where = "hosts at " + where.removeprefix("netns:").replace("mbit", " Mbit/s").replace(",", " + ")
        where = where.replace("gbit", " Gbit/s").replace("1ms", "1 ms")
    else:
        where = f"ranks on {where}"
    pace = record.config.get("pace_dense") or 0
    return f"{record.workers} {where}, " + (f"dense PACED to {pace:g} ms" if record.paced else "unpaced")


def step_frame(records: Iterable[Record]) -> pd.DataFrame:
    """One row per record and step, sorted by the record's key and the step; a column per metric, NaN where absent.

    Beside them: ``key``, ``method``, ``label``, ``workers``, ``setting``, ``session``, ``conditions`` and
    ``round``, the interleaved round that the step belongs to (warm-up leaves a gap between two).
    """
    frames = []
    for record in distinct(records):
        steps = np.asarray(record.steps, dtype=np.int64)
        if not len(steps):
            continue
        values = {name: record.metrics[name] for name in METRICS if len(record.metrics.get(name, ())) == len(steps)}
        frame = pd.DataFrame(values, index=range(len(steps)), dtype="float64")
        facts: dict[str, Any] = {
            "key": record.key,
            "method": record.method,
            "label": label_of(record),
            "workers": record.workers,
            "setting": setting_of(record),
            "session": session_of(record),
            "conditions": describe(record),
            "step": steps,
            "round": np.concatenate([[0], np.cumsum(np.diff(steps) > 1)]),
        }
        frames.append(frame.assign(**facts))
    columns = ["key", "method", "label", "workers", "setting", "session", "conditions", "step", "round"]
    if not frames:
        return pd.DataFrame(columns=[*columns, *METRICS])
    return pd.concat(frames, ignore_index=True).reindex(columns=[*columns, *METRICS])


def told_apart(steps: pd.DataFrame) -> pd.DataFrame:
    """``steps`` with conditions that name one setting each: where two read alike, what differs between them is added.

    A store that holds a run of another size beside the first (``--size tiny``, then full) has such settings.
    """
    names: dict[str, str] = {}
    for _, alike in steps.drop_duplicates("setting").groupby("conditions", sort=True):
        flat = {text: _flat("", json.loads(text)[-1]) for text in alike["setting"]}
        keys = sorted({key for one in flat.values() for key in one})
        differ = [key for key in keys if len({str(one.get(key)) for one in flat.values()}) > 1]
        for text, conditions in zip(alike["setting"], alike["conditions"], strict=True):
            names[text] = ", ".join([conditions, *(f"{key} {flat[text].get(key, NOT_SAID)}" for key in differ)])
    return steps.assign(conditions=steps["setting"].map(names))


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    """Values of nested mappings by the last of their names; lists count as one value."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {key: one for name, part in value.items() for key, one in _flat(name, part).items()}


_GROUP = ["setting", "conditions", "workers", "label"]


def medians(steps: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Long form, a row per setting, method and metric: ``value`` (median), ``low``, ``high`` (quartiles), ``n``."""
    if steps.empty:
        return pd.DataFrame(columns=[*_GROUP, "metric", "value", "low", "high", "n"])
    long = steps.melt(id_vars=_GROUP, value_vars=list(metrics), var_name="metric", value_name="x").dropna(subset="x")
    grouped = long.groupby([*_GROUP, "metric"], sort=True)["x"]
    result = grouped.quantile([0.25, 0.5, 0.75]).unstack()
    result.columns = pd.Index(["low", "value", "high"])
    return result.assign(n=grouped.size()).reset_index()


def ratios(steps: pd.DataFrame, base: str, metric: str = "step_ms") -> pd.DataFrame:
    """How many times ``base``'s ``metric`` is each method's, both within one session and round.

    Long form as ``medians``, ``metric`` "speedup": median over rounds, with the smallest and the largest.
    """
    if steps.empty or not (steps["label"] == base).any():
        return pd.DataFrame(columns=[*_GROUP, "metric", "value", "low", "high", "n"])
    keys = ["setting", "conditions", "workers", "session", "round", "label"]
    rounds = steps.groupby(keys, sort=True)[metric].median().reset_index()
    bases = rounds[rounds["label"] == base].drop(columns="label")
    joined = rounds.merge(bases, on=keys[:-1], suffixes=("", "_base"))
    joined["x"] = joined[f"{metric}_base"] / joined[metric]
    grouped = joined.groupby(_GROUP, sort=True)["x"]
    result = grouped.agg(low="min", value="median", high="max", n="size").reset_index()
    return result.assign(metric="speedup")


def published_frame(rows: Iterable[Published]) -> pd.DataFrame:
    """The published numbers, with the row ``label`` that each belongs to."""
    frame = pd.DataFrame([vars(row) for row in rows])
    return frame.assign(label=frame["method"].map(PAPER_LABELS))
