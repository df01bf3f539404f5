"""Sweeps of small points on a real Slurm: submitting them, waiting for them, and what they should have given."""

from __future__ import annotations

import json
from pathlib import Path

from nestpipe.measurement.record import Record, Store
from slurm.folder import SweepFolder
from slurm.status import counts, point_states
from tests.support.local_slurm import (
    nestpipe,
    wait_for,
)

SMALL = """\
[base]
batch_size = 16
micro_batch = 4
negatives = 8
sequence_length = 16
dense_layers = 1
width = 16
data_scale = 0.0002
embedding_dim = 8
steps = {steps}
pace_dense = {pace}

[[sweep]]
method = {methods}
workers = {workers}

[cluster]
tasks_per_node = 2
parallelism = 2
time = {minutes}
signal_delay_s = 30
max_timeouts = 1
# Longer than any of these runs: only the signal can save.
checkpoint_every = 1000000
{more}
"""


def write_grid(path: Path, steps=4, pace=0.0, methods=("nestpipe",), workers=(4,), minutes=20, more="") -> str:
    text = SMALL.format(
        steps=steps, pace=float(pace), methods=json.dumps(methods), workers=list(workers), minutes=minutes, more=more
    )
    path.write_text(text)
    return str(path)


def submit(grid: str, folder: Path, *words: str) -> str:
    return nestpipe("submit", grid, "--executor", "slurm", "--folder", str(folder), *words)


def states(folder: Path) -> str:
    return counts(point_states(SweepFolder(folder)))


def wait_until(folder: Path, words: str, seconds: float = 400) -> None:
    def explain() -> str:
        logs = sorted((folder / "logs").glob("*.err"), key=lambda p: p.stat().st_mtime)
        return f"'{words}', found '{states(folder)}': {point_states(SweepFolder(folder))}\n" + "\n".join(
            log.read_text()[-2000:] for log in logs[-2:]
        )

    wait_for(lambda: words in states(folder), seconds, explain)


def progress(folder: Path) -> dict:
    (point,) = SweepFolder(folder).points()
    return point.progress


def wait_for_steps(folder: Path, steps: int) -> None:
    wait_for(lambda: progress(folder).get("step", 0) >= steps, 300, f"step {steps}, found {progress(folder)}")


def records(folder: Path) -> dict[str, Record]:
    """By point's hash, through the store that tables are made from."""
    nestpipe("collect", str(folder), "--store", str(folder) + "-store")
    found, skipped = Store(Path(str(folder) + "-store")).read()
    assert not skipped
    return {r.provenance["sweep"]["point"]: r for r in found}


def undisturbed(grid: str, folder: Path) -> dict[str, Record]:
    """The records of the same points, run on this machine without any fault."""
    other = Path(str(folder) + "-local")
    nestpipe("submit", grid, "--executor", "local", "--folder", str(other))
    return records(other)


def same_losses(a: dict[str, Record], b: dict[str, Record]) -> bool:
    return a.keys() == b.keys() and all(list(a[name].losses) == list(b[name].losses) for name in a)
