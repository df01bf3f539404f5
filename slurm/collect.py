"""Copies results into the record store. It reads only files; running it again changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nestpipe.machine.files import write_atomically
from nestpipe.machine.json_files import read_json
from nestpipe.measurement.record import RecordError, record_from_json
from slurm.folder import SweepError, SweepFolder


@dataclass(frozen=True)
class Collected:
    """``new``, ``same``: records that the store lacked or had already, counted. ``bad``: a sentence per broken file.
    ``diverged``: a sentence per record whose training has diverged."""

    new: int
    same: int
    bad: Sequence[str]
    diverged: Sequence[str] = ()


def collect(sweep: SweepFolder, store: Path) -> Collected:
    """Copy every result into the folder ``store``, under the names that a record store gives them.

    A broken result is left out. Raises SweepError if the store cannot be written; the results stay in the sweep.
    """
    new = same = 0
    bad, diverged = [], []
    for path in sorted(sweep.path.glob("points/*/result/*.json")):
        try:
            record = record_from_json(read_json(path), str(path))
            content = path.read_bytes()
        except (OSError, ValueError) as error:  # RecordError is a ValueError
            known = isinstance(error, RecordError)
            bad.append(str(error) if known else f"{path}: cannot be read ({error}); remove it and resume")
            continue
        if record.diverged:
            diverged.append(f"{path.name}: {record.diverged}")
        try:
            if _put(store / path.name, content):
                new += 1
            else:
                same += 1
        except OSError as error:
            raise SweepError(
                f"cannot write into the store {store}: {error.strerror}; {new + same} records are in it, all results "
                f"stay in {sweep.path}: make room or choose another --store, then collect again"
            ) from None
    return Collected(new, same, bad, diverged)


def _put(target: Path, content: bytes) -> bool:
    """Whether ``target`` was written: False if it has this content already."""
    if target.is_file() and target.read_bytes() == content:
        return False
    write_atomically(target, content, durable=False)  # the sweep keeps the source: no need to wait for the disk
    return True
