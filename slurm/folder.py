"""A sweep's folder: one folder per point, named by its hash. Every file is written whole or not at all.

sweep.json                          executor and cluster of the latest submission
points/HASH/point.json              what the point is
points/HASH/submission.json         executor, job and time of its latest submission
points/HASH/progress.json           the latest step of the job that runs it
points/HASH/failures/JOB-RANK.json  what went wrong on a rank
points/HASH/checkpoints/            saved states, removed when there is a result
points/HASH/result/*.json           the record: the point is done
logs/                               submitit's pickles, stdout and stderr of every task
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nestpipe.machine.files import write_atomically
from nestpipe.machine.json_files import json_text, read_json
from nestpipe.machine.locking import sole_writer
from nestpipe.measurement.record import Record, Store
from slurm.grid import Grid, JobCluster
from slurm.point import Point, point_from_json

#: Note in progress.json of a job that was sent SIGTERM, for example by scancel.
TOLD_TO_STOP = "told to stop"


class SweepError(RuntimeError):
    """A sweep cannot continue. One line: what is wrong, what to do."""


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file; {} if the file is missing or cannot be read (another version, or the disk was full)."""
    try:
        data = read_json(path)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write the whole file or nothing. Raises OSError."""
    write_atomically(path, json_text(data, indent=1, default=str) + "\n")


@dataclass(frozen=True)
class PointFolder:
    """What is known about one point."""

    path: Path

    @property
    def point(self) -> Point | None:
        data = read_object(self.path / "point.json")
        return point_from_json(data) if data else None

    @property
    def result(self) -> Path | None:
        """The record's file, None until the point is done."""
        return next(iter(sorted((self.path / "result").glob("*.json"))), None)

    @property
    def submission(self) -> dict[str, Any]:
        return read_object(self.path / "submission.json")

    @property
    def progress(self) -> dict[str, Any]:
        return read_object(self.path / "progress.json")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def failures(self, job: str) -> list[dict[str, Any]]:
        """The failures of ``job``: causes before consequences, both in order of time."""
        found = [read_object(path) for path in (self.path / "failures").glob(f"{job}-*.json")]
        return sorted(filter(None, found), key=lambda f: (f.get("consequence", False), f.get("time", 0.0)))

    def write_result(self, record: Record) -> Path:
        """Raises OSError and leaves nothing half-written."""
        return Store(self.path / "result").write(record)

    def write_submission(self, executor: str, job: str) -> None:
        write_json(self.path / "submission.json", {"executor": executor, "job": job, "time": time.time()})


@dataclass(frozen=True)
class SweepFolder:
    """A sweep's folder. ``settings`` raises SweepError if nothing has been submitted yet."""

    path: Path

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def stop_file(self) -> Path:
        """A file that tells a submission that runs points on this machine to stop."""
        return self.path / "cancel"

    def point(self, name: str) -> PointFolder:
        return PointFolder(self.path / "points" / name)

    def points(self) -> list[PointFolder]:
        """All points that were ever submitted here, in order of submission and hash."""
        found = [PointFolder(path.parent) for path in (self.path / "points").glob("*/point.json")]
        return sorted(found, key=lambda p: (p.submission.get("time", 0.0), p.path.name))

    def add(self, points: Sequence[Point]) -> None:
        for point in points:
            folder = self.point(point.hash)
            if not (folder.path / "point.json").exists():
                write_json(folder.path / "point.json", point.decisive)

    def write_settings(self, grid: Grid, executor: str) -> None:
        write_json(
            self.path / "sweep.json",
            {"grid": grid.name, "file": str(grid.path), "executor": executor, "cluster": asdict(grid.cluster)},
        )

    def settings(self) -> tuple[str, str, JobCluster]:
        """The grid's name, the executor and the cluster of the latest submission."""
        data = read_object(self.path / "sweep.json")
        if not data:
            raise SweepError(f"{self.path} holds no sweep; submit one: nestpipe sweep submit GRID --folder {self.path}")
        cluster = {**data["cluster"], "setup": tuple(data["cluster"].get("setup", ()))}
        return data["grid"], data["executor"], JobCluster(**cluster)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Allow one submission at a time, so that no point is submitted twice. Raises SweepError during another one."""
        busy = f"another command is submitting to {self.path}; wait for it"
        with sole_writer(self.path, busy=busy, option="--folder", error=SweepError):
            yield
