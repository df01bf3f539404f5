"""What a rank leaves behind when its job fails, even on a full disk."""

from __future__ import annotations

import os
import socket
import time
import traceback
from pathlib import Path

from nestpipe.ranks.process import CONSEQUENCE
from slurm.folder import PointFolder, write_json

BALLAST_BYTES = 65536


class GaveUp(RuntimeError):
    """The job reached its time limit once too often."""


def write_failure(folder: PointFolder, job: str, rank: int, error: Exception) -> None:
    """Record ``error`` in the point's folder. If even that cannot be written, the task's stderr has it."""
    lines = str(error).strip().splitlines() or [""]
    what = lines[0] if isinstance(error, GaveUp) else f"{type(error).__name__}: {lines[0]}"
    data = {
        "job": job,
        "rank": rank,
        "what": what,
        "consequence": CONSEQUENCE.search(what) is not None,
        "host": socket.gethostname(),
        "time": time.time(),
        "traceback": traceback.format_exc().splitlines()[-12:],
    }
    try:
        drop_ballast(folder, job)
        write_json(folder.path / "failures" / f"{job}-{rank}.json", data)
    except OSError as full:
        print(f"cannot record the failure: {full}", flush=True)


def take_ballast(folder: PointFolder, job: str) -> None:
    """Reserve some disk space, which is freed for the report of a failure in case the disk is full by then."""
    # Random bytes: some file systems store no zeros.
    _ballast(folder, job).write_bytes(os.urandom(BALLAST_BYTES))


def drop_ballast(folder: PointFolder, job: str) -> None:
    _ballast(folder, job).unlink(missing_ok=True)


def _ballast(folder: PointFolder, job: str) -> Path:
    return folder.path / f"ballast-{job}"
