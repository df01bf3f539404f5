"""What tables and figures are made from: records by part, published numbers, and frames, each made only once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from nestpipe.machine.json_files import read_json
from nestpipe.measurement.record import Record, RecordError, Store, record_from_json
from nestpipe.training.convergence import Curve, read_curves
from results.frames.frames import measured_medians, published_frame, simulated_means, step_frame, told_apart
from results.published import Published, load_published

Made = TypeVar("Made")


@dataclass(frozen=True)
class Sources:
    """What artefacts are made from.

    ``parts``: records by the name of their store (see ``results.experiments.part_names``). ``folder``: holds
    stores, timelines and outputs. ``skipped``: a sentence for each file that is not a record. Frames are shared
    between artefacts: do not change one in place.
    """

    parts: Mapping[str, tuple[Record, ...]]
    published: tuple[Published, ...]
    folder: Path
    skipped: tuple[str, ...] = ()
    _made: dict[tuple[str, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, *parts: str) -> tuple[Record, ...]:
        """The records of these parts, one per key, in an order that does not depend on how they were read."""
        return self._once(
            ("records", *parts), lambda: distinct(record for part in parts for record in self.parts.get(part, ()))
        )

    def measured(self, *parts: str) -> tuple[Record, ...]:
        """The measured records among those of ``of``."""
        return tuple(record for record in self.of(*parts) if record.kind == "measured")

    def missing(self, *parts: str) -> tuple[str, ...]:
        """The parts among ``parts`` that have no records."""
        return tuple(part for part in parts if not self.parts.get(part))

    def steps(self, *parts: str) -> pd.DataFrame:
        """``step_frame`` of the measured records, with distinct conditions (``told_apart``)."""
        return self._once(("steps", *parts), lambda: told_apart(step_frame(self.measured(*parts))))

    def measured_medians(self, *parts: str) -> pd.DataFrame:
        return self._once(("medians", *parts), lambda: measured_medians(self.steps(*parts)))

    def simulated_means(self, *parts: str) -> pd.DataFrame:
        return self._once(("means", *parts), lambda: simulated_means(self.of(*parts)))

    def curves(self) -> tuple[Curve, ...]:
        """Loss and accuracy by method and seed, for the setting with the most curves in ``folder``."""
        return self._once(("curves",), lambda: _of_one_setting(read_curves(self.folder / "convergence")))

    def diverged(self) -> tuple[str, ...]:
        """A sentence for each record and curve whose training has diverged."""
        records = [f"{part}: {said}" for part in sorted(self.parts) for r in self.of(part) if (said := r.diverged)]
        return (*records, *(f"convergence: {said}" for curve in self.curves() if (said := curve.diverged)))

    def published_numbers(self) -> pd.DataFrame:
        return self._once(("published",), lambda: published_frame(self.published))

    def _once(self, name: tuple[str, ...], make: Callable[[], Made]) -> Made:
        if name not in self._made:
            self._made[name] = make()
        made: Made = self._made[name]
        return made


def distinct(records: Iterable[Record]) -> tuple[Record, ...]:
    """One record per key, sorted by key. Of two different records with the same key, the one whose text sorts last."""
    chosen: dict[str, tuple[str, Record]] = {}
    for record in records:
        entry = (repr(record), record)
        key = record.key
        if key not in chosen or chosen[key][0] < entry[0]:
            chosen[key] = entry
    return tuple(chosen[key][1] for key in sorted(chosen))


def _of_one_setting(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    settings = [curve.setting for curve in curves]
    most = max(dict.fromkeys(settings), key=settings.count, default="")
    return tuple(curve for curve in curves if curve.setting == most)


def sources_from(folder: Path, records: Path | None = None) -> Sources:
    """Everything under ``folder``. ``records``: default is its subfolder of that name. Raises RecordError."""
    if records is not None and not records.exists():
        raise RecordError(f"{records}: no such folder or file; correct --records")
    parts, skipped = read_parts(records or folder / "records")
    return Sources(parts, tuple(load_published()), folder, tuple(skipped))


def read_parts(root: Path) -> tuple[dict[str, tuple[Record, ...]], list[str]]:
    """Records by part, and a sentence for each file that is not a record.

    ``root``: a folder with one store per part, a single store, a JSON file from ``run`` or ``simulate --json``, or a
    pytest-benchmark file that the suites wrote. Raises RecordError if a file is neither of the last two.
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
        data = read_json(path)
        if alone := data.get("records") or list(data.get("methods", {}).values()):
            return {path.name: tuple(record_from_json(record, path.name) for record in alone)}
        entries = [b["extra_info"] for b in data["benchmarks"]]
    except RecordError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"{path}: holds no records; give a folder of records, or a file from run --json or pytest-benchmark"
        ) from error
    parts: dict[str, list[Record]] = {}
    for entry in entries:
        for part, record in entry.get("records", []):
            parts.setdefault(part, []).append(record_from_json(record, path.name))
    return {part: tuple(records) for part, records in parts.items()}
