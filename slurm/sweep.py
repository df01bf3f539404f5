"""Submits, resumes and cancels a grid. Only ``resume`` submits a point again that was submitted before."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestpipe.methods import methods_of
from nestpipe.simulator.scenario import SimulateConfig, simulate
from slurm.executors import EXECUTORS, Watch
from slurm.folder import SweepError, SweepFolder
from slurm.grid import Grid, JobCluster
from slurm.point import Point
from slurm.status import ALIVE, RESUMABLE, PointState, point_states


@dataclass(frozen=True)
class Submitted:
    """``jobs``: ids of the jobs that outlive the submission; none if the points have run by then."""

    new: int
    simulated: int
    before: int
    jobs: Sequence[str] = ()


def submit(sweep: SweepFolder, grid: Grid, executor: str, watch: Watch | None = None) -> Submitted:
    """Submit the points of ``grid`` that this folder has never seen to one of EXECUTORS.

    ``watch`` is called now and then while points run.
    Raises SweepError, or ConfigError and UnknownMethod for a point that cannot run, before anything is submitted.
    """
    for point in grid.points:
        if not point.simulated:
            _validate(point)
    with sweep.locked():
        new = [p for p in grid.points if not (sweep.point(p.hash).submission or sweep.point(p.hash).result)]
        sweep.add(new)
        sweep.write_settings(grid, executor)
        before = len(grid.points) - len(new)
        return _start(sweep, grid.name, new, grid.cluster, executor, before, watch)


def resume(sweep: SweepFolder, changes: dict[str, Any], watch: Watch | None = None) -> Submitted:
    """Submit again all missing, failed, cancelled or lost points; ``changes`` to the cluster's settings are kept.

    Raises SweepError, also if Slurm cannot say which jobs still run.
    """
    with sweep.locked():
        name, executor, cluster = sweep.settings()
        cluster = dataclasses.replace(cluster, **{k: v for k, v in changes.items() if v is not None})
        states = point_states(sweep)
        if any(s.state == "unknown" for s in states):
            raise SweepError("squeue does not answer, so which jobs still run is unknown; resume once it does")
        again = [s for s in states if s.state in RESUMABLE and s.point]
        for state in again:
            _forget(state)
        sweep.write_settings(Grid(name, Path(name), cluster, ()), executor)
        points = [s.point for s in again if s.point]
        return _start(sweep, name, points, cluster, executor, len(states) - len(again), watch)


def _forget(state: PointState) -> None:
    """Remove old failures, so that the next job of the point starts clean. What was saved stays."""
    for path in [*state.folder.path.glob("failures/*.json"), state.folder.path / "cancelled"]:
        path.unlink(missing_ok=True)


def _validate(point: Point) -> None:
    methods_of(point.run_config(1.0))


def _start(
    sweep: SweepFolder,
    name: str,
    points: Sequence[Point],
    cluster: JobCluster,
    executor: str,
    before: int,
    watch: Watch | None,
) -> Submitted:
    simulated = [p for p in points if p.simulated]
    real = [p for p in points if not p.simulated]
    for point in simulated:
        _simulate(sweep, point)
    jobs = EXECUTORS[executor](sweep).submit(real, name, cluster, watch or _nothing) if real else []
    return Submitted(len(real), len(simulated), before, jobs)


def _nothing() -> None:
    pass


def _simulate(sweep: SweepFolder, point: Point) -> None:
    """Simulate the point instead of running it. Its record says so, and on what hardware."""
    config = SimulateConfig(
        hardware=point.hardware,
        methods=point.method,
        workers=str(point.workers),
        micro_batch=point["batch_size"] // point.micro_batches,
        batch_size=point["batch_size"],
        embedding_dim=point["embedding_dim"],
        dense_layers=point["dense_layers"],
        sequence_length=point["sequence_length"],
        groups=point["replica_groups"],
        steps=point["steps"],
        seed=point.seed,
    )
    sweep.point(point.hash).write_result(simulate(config)[0])


def cancel(sweep: SweepFolder) -> list[PointState]:
    """Cancel every job that waits or runs; what they saved stays for ``resume``. Returns the states before."""
    sweep.settings()
    sweep.stop_file.touch()
    states = [s for s in point_states(sweep) if s.state in ALIVE]
    jobs: dict[str, list[str]] = {}
    for state in states:
        (state.folder.path / "cancelled").write_text("")
        jobs.setdefault(state.folder.submission["executor"], []).append(state.job)
    for name, ids in jobs.items():
        EXECUTORS[name](sweep).cancel(ids)
    return states
