"""The run record: one method, one configuration, one seed. One schema, one writer, one store.

A record is flat JSON. Each metric is a list of per-step values, which are means over ranks. ``median`` has the
median of each metric. ``kind`` says where the numbers come from: ``published`` (printed in a publication),
``simulated`` (virtual clocks) or ``measured`` (real processes).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from nestpipe.machine.files import slug, write_atomically
from nestpipe.machine.json_files import json_text, numbers, read_json
from nestpipe.measurement.exposed_time import EXPOSED, StepTimes

SCHEMA = "nestpipe-record-1"
KINDS = ("published", "simulated", "measured")

#: Every per-step metric of a record. Times are in ms, traffic is in bytes summed over ranks, qps is in samples/s.
METRICS = (
    "step_ms",
    "qps",
    "dense_ms",
    "update_ms",
    "input_ms",
    "exposed_input_ms",
    "lookup_ms",
    "exposed_lookup_ms",
    "communication_ms",
    "exposed_communication_ms",
    "exposed_communication_ratio",
    "exposed_vs_serial",
    "dense_sync_ms",
    "exposed_dense_sync_ms",
    "skew_ms",
    "other_ms",
    "utilisation",
    "duplication_factor",
    "embedding_bytes",
    "minimum_embedding_bytes",
    "replica_bytes",
)


class RecordError(ValueError):
    """A file is not a record of this schema. The message says which file and why."""


def diverged(what: str, losses: Sequence[float]) -> str:
    """A sentence that says so if a loss of ``what`` is not a finite number, else ""."""
    bad = np.flatnonzero(~np.isfinite(np.asarray(losses, dtype=np.float64)))
    if not len(bad):
        return ""
    return (
        f"{what} DIVERGED: the loss of step {bad[0] + 1} of {len(losses)} is not a finite number, so what it learned "
        "is worthless; choose smaller learning rates"
    )


@dataclass(frozen=True)
class Record:
    """``metrics``: per-step lists by name (METRICS). ``steps``: the step numbers that the values belong to.

    ``losses``: the global loss of every step from 0 on, including warm-up. ``paper_method``: the method in the paper
    that this one is compared with, or None. ``paced``: dense compute was stretched to imitate an accelerator.
    """

    kind: str
    method: str
    paper_method: str | None
    workers: int
    seed: int
    config: Mapping[str, Any]
    steps: Sequence[int]
    metrics: Mapping[str, Sequence[float]]
    losses: Sequence[float] = ()
    paced: bool = False
    testbed: str = "loopback"
    evaluation: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> dict[str, float]:
        """The median of each metric over the steps. Metrics without values are left out."""
        return {name: float(np.median(values)) for name, values in self.metrics.items() if len(values)}

    def typical(self, name: str) -> float:
        """One number for a metric: its mean over the steps of a simulated record, its median for any other."""
        values = self.metrics[name]
        return float(np.mean(values) if self.kind == "simulated" else np.median(values))

    def speedup_over(self, other: Record) -> float:
        """How many times faster this record's step is than the other's."""
        return other.typical("step_ms") / self.typical("step_ms")

    def scaling_from(self, base: Record) -> float:
        """QPS per worker relative to that of ``base``, which has a different number of workers."""
        return self.typical("qps") / self.workers / (base.typical("qps") / base.workers)

    @property
    def diverged(self) -> str:
        """A sentence if a step's loss was not a finite number, else ""."""
        return diverged(self.method, self.losses)

    @property
    def key(self) -> str:
        """16 hex digits that identify what was run. The same run has the same key if it is repeated."""
        identity = {
            name: getattr(self, name) for name in ("kind", "method", "workers", "seed", "testbed", "paced", "config")
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        head = asdict(self)
        metrics = head.pop("metrics")
        return {"schema": SCHEMA, "key": self.key, **head, **metrics, "median": self.median}


def record_from_json(data: Any, source: str = "record") -> Record:
    """The record from the result of ``to_json``. Raises RecordError, which names ``source``."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise RecordError(f"{source}: expected schema {SCHEMA}, found {found!r}: another version or program made it")
    names = set(Record.__dataclass_fields__) - {"metrics"}
    missing = sorted(name for name in ("kind", "method", "workers", "seed", "config", "steps") if name not in data)
    if missing:
        raise RecordError(f"{source}: lacks {', '.join(missing)}")
    if data["kind"] not in KINDS:
        raise RecordError(f"{source}: kind {data['kind']!r} is not one of {', '.join(KINDS)}")
    metrics = {name: data[name] for name in METRICS if name in data}
    if isinstance(losses := data.get("losses", []), list) and isinstance(quality := data.get("evaluation", {}), dict):
        evaluation = dict(zip(quality, numbers(list(quality.values())), strict=True))
        data = {**data, "losses": numbers(losses), "evaluation": evaluation}
    _require_kinds(data, metrics, source)
    return Record(**{name: data[name] for name in names if name in data}, metrics=metrics)


#: No run has as many workers, micro-batches or steps, and 64-bit integers hold more.
_MANY = 1 << 40

#: The types that readers of a record rely on, by field. ``paper_method`` may also be null.
_FIELD_KINDS: Mapping[str, tuple[type, ...]] = {
    "method": (str,),
    "paper_method": (str, NoneType),
    "workers": (int,),
    "seed": (int,),
    "config": (dict,),
    "steps": (list,),
    "losses": (list,),
    "paced": (bool,),
    "testbed": (str,),
    "evaluation": (dict,),
    "notes": (list,),
    "provenance": (dict,),
}


def _require_kinds(data: Mapping[str, Any], metrics: Mapping[str, Any], source: str) -> None:
    """Raises RecordError for a value that readers cannot use, as in a file that another program made."""
    for name, kinds in _FIELD_KINDS.items():
        if name in data and type(data[name]) not in kinds:
            raise RecordError(f"{source}: {name} is {_short(data[name])}, expected {kinds[0].__name__}")
    wanted = {"measured": ("micro_batches", "data", "model"), "simulated": ("micro_batches", "hardware", "workload")}
    config = data["config"]
    if lacking := [name for name in wanted.get(data["kind"], ()) if name not in config]:
        raise RecordError(f"{source}: its config lacks {', '.join(lacking)}")
    for name in ("data", "model", "workload"):
        if name in config and type(config[name]) is not dict:
            raise RecordError(f"{source}: {name} in its config is {_short(config[name])}, expected dict")
    for name, value in {"workers": data["workers"], "micro_batches": config.get("micro_batches", 1)}.items():
        if type(value) is not int or not 1 <= value < _MANY:
            raise RecordError(f"{source}: {name} is {_short(value)}, expected a whole number from 1 to {_MANY - 1}")
    for name, values in {"steps": data["steps"], "losses": data.get("losses", []), **metrics}.items():
        numbers = {int} if name == "steps" else {int, float}
        if type(values) is not list or not set(map(type, values)) <= numbers:
            raise RecordError(f"{source}: {name} is {_short(values)}, expected a list of numbers")
        if name in metrics and len(values) not in (0, len(data["steps"])):
            raise RecordError(f"{source}: {name} has {len(values)} values for {len(data['steps'])} steps")
        if name == "steps" and not all(abs(step) < _MANY for step in values):
            raise RecordError(f"{source}: steps has a number of {_MANY} or more")
        if name in metrics and not np.isfinite(np.array(values, dtype=np.float64)).all():
            raise RecordError(f"{source}: {name} has a value that is not a finite number; run it again")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def metrics_from_times(times: StepTimes, keep: Sequence[int], samples: Mapping[int, float]) -> dict[str, list[float]]:
    """The metrics that follow from ``times``, of a real or a simulated run.

    ``keep``: which steps to report. ``samples``: global samples by step. Ratios are computed per step, from means
    over ranks: QPS = samples / step; exposed ratio = exposed / own total; utilisation = dense / step.
    """
    index = [times.steps.index(step) for step in keep]
    mean = {name: times.mean(name)[index] for name in times.ms}
    exposed, total = mean["exposed_communication"], mean["communication"]
    values = {
        **{f"{name}_ms": mean[name] for name in ("step", "dense", "update", "skew", "other", *EXPOSED)},
        **{f"exposed_{name}_ms": mean[f"exposed_{name}"] for name in EXPOSED},
        "qps": np.array([samples[step] for step in keep]) / mean["step"] * 1e3,
        "exposed_communication_ratio": np.divide(exposed, total, out=np.zeros_like(total), where=total > 0),
        "utilisation": mean["dense"] / mean["step"],
    }
    return {name: [float(x) for x in values[name]] for name in METRICS if name in values}


@dataclass(frozen=True)
class Store:
    """A folder with one file per record, named by kind, method and key."""

    folder: Path

    def write(self, record: Record) -> Path:
        """Write ``record`` to the file at the returned path. It replaces one with the same kind, method and key."""
        path = self.folder / f"{record.kind}-{slug(record.method)}-{record.key}.json"
        write_atomically(path, json_text(record.to_json(), indent=1, default=str) + "\n")
        return path

    def read(self) -> tuple[list[Record], list[str]]:
        """All records in order of file name, and a sentence for each file that is not a record."""
        records, skipped = [], []
        for path in sorted(self.folder.glob("*.json")):
            try:
                records.append(record_from_json(read_json(path), path.name))
            except RecordError as error:
                skipped.append(str(error))
            except (OSError, ValueError) as error:
                skipped.append(f"{path.name}: cannot be read as JSON ({error}); remove it or run it again")
        return records, skipped
