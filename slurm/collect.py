"""Bring results into the one record store. Reads files alone; running it again changes nothing."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nestpipe.measurement.record import RecordError, record_from_json
from slurm.folder import SweepError, SweepFolder


@dataclass(frozen=True)
class Collected:
    """``new`` and ``same``: records that the store lacked, or had already. ``bad``: a sentence per broken file."""

    new: int
    same: int
    bad: Sequence[str]


def collect(sweep: SweepFolder, store: Path) -> Collected:
    """Copy every result into the folder ``store``, under the names that a record store gives them.

    A broken result loses only itself. Raises SweepError where the store cannot be written; results stay in the sweep.
    """
    new = same = 0
    bad = []
    for path in sorted(sweep.path.glob("points/*/result/*.json")):
        try:
            content = path.read_bytes()
            record_from_json(json.loads(content), str(path))
        except (OSError, ValueError) as error:  # RecordError is one
            known = isinstance(error, RecordError)
            bad.append(str(error) if known else f"{path}: cannot be read ({error}); remove it and resume")
            continue
        try:
            if _put(store / path.name, content):
                new += 1
            else:
                same += 1
        except OSError as error:
            raise SweepError(
                f"cannot write into the store {store}: {error.strerror}; {new + same} records are in, all results "
                f"stay in {sweep.path}: make room or choose another --store, then collect again"
            ) from None
    return Collected(new, same, bad)


def _put(target: Path, content: bytes) -> bool:
    """Whether ``target`` was written: whole or not at all. Not forced to disk one by one, since its source stays."""
    try:
        if target.read_bytes() == content:
            return False
    except FileNotFoundError:
        target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return True
