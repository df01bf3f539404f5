"""Submit a grid, go on where it stopped, cancel it. What was submitted once, only ``resume`` submits again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestpipe.methods import methods_of
from nestpipe.simulator.scenario import SimulateConfig, simulate
from slurm.executors import (
    Executor,
    alive_on_machine,
    cancel_in_slurm,
    run_for_debugging,
    submit_to_machine,
    submit_to_slurm,
)
from slurm.folder import SweepError, SweepFolder
from slurm.grid import Cluster, Grid
from slurm.point import Point
from slurm.status import RESUMABLE, PointState, point_states

#: After this a local job that was asked to end is killed.
END_S = 10.0
#: A file in the sweep's folder that tells a running local submission to stop.
CANCEL = "cancel"


@dataclass(frozen=True)
class Submitted:
    """``jobs``: ids of Slurm jobs, empty for the other executors, which have run the points by now."""

    new: int
    simulated: int
    before: int
    jobs: Sequence[str] = ()


Watch = Callable[[], None]


def submit(sweep: SweepFolder, grid: Grid, executor: Executor, watch: Watch | None = None) -> Submitted:
    """Submit the points of ``grid`` that this folder has never seen; ``watch`` is called now and then meanwhile.

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
    """Submit anew what is missing, failed, cancelled or lost; ``changes`` to the cluster's settings are kept.

    Raises SweepError, also where Slurm cannot say which jobs still run.
    """
    with sweep.locked():
        name, executor, cluster = sweep.settings()
        cluster = dataclasses.replace(cluster, **{k: v for k, v in changes.items() if v is not None})
        states = point_states(sweep)
        if any(s.state == "unknown" for s in states):
            raise SweepError("squeue does not answer, so which jobs still run is unknown; resume where it does")
        again = [s for s in states if s.state in RESUMABLE and s.point]
        for state in again:
            _forget(state)
        sweep.write_settings(Grid(name, Path(name), cluster, ()), executor)
        points = [s.point for s in again if s.point]
        return _start(sweep, name, points, cluster, executor, len(states) - len(again), watch)


def _forget(state: PointState) -> None:
    """The next job of the point starts with a clean sheet; what was saved stays."""
    for path in [*state.folder.path.glob("failures/*.json"), state.folder.path / "cancelled"]:
        path.unlink(missing_ok=True)


def _validate(point: Point) -> None:
    methods_of(point.run_config(1.0))


def _start(
    sweep: SweepFolder,
    name: str,
    points: Sequence[Point],
    cluster: Cluster,
    executor: Any,
    before: int,
    watch: Watch | None,
) -> Submitted:
    simulated = [p for p in points if p.simulated]
    real = [p for p in points if not p.simulated]
    for point in simulated:
        _simulate(sweep, point)
    if not real:
        return Submitted(0, len(simulated), before)
    if executor == "slurm":
        return Submitted(len(real), len(simulated), before, submit_to_slurm(sweep, name, real, cluster))
    if executor == "debug":
        for point in real:
            run_for_debugging(sweep, point, cluster)
    else:
        _run_on_machine(sweep, real, cluster, watch or (lambda: None))
    return Submitted(len(real), len(simulated), before)


def _simulate(sweep: SweepFolder, point: Point) -> None:
    """Nothing runs: the point's record says that it is simulated, and on what."""
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


def _run_on_machine(sweep: SweepFolder, points: Sequence[Point], cluster: Cluster, watch: Watch) -> None:
    """Run points here, ``parallelism`` at a time. On Ctrl-C or SIGTERM the running ones are ended."""
    waiting, running = list(points), dict[str, Any]()
    stop = sweep.path / CANCEL
    stop.unlink(missing_ok=True)
    with _sigterm_unwinds():
        try:
            while waiting or running:
                if stop.exists():
                    raise SweepError(f"cancelled; {len(waiting)} points were not started: nestpipe sweep resume")
                while waiting and len(running) < cluster.parallelism:
                    job = submit_to_machine(sweep, waiting.pop(0), cluster)
                    running[job.job_id] = job
                running = {name: job for name, job in running.items() if not job.done()}
                watch()
                time.sleep(0.2)
        finally:
            end_on_machine(sweep, list(running))


def end_on_machine(sweep: SweepFolder, jobs: Sequence[str]) -> None:
    """End local jobs with their tasks: all are asked first, what is left of them is killed."""
    families = {job: [int(job), *_descendants(int(job))] for job in jobs if alive_on_machine(job, sweep.logs)}
    ours = [pid for family in families.values() for pid in family]
    for pid in ours:
        _kill(pid, signal.SIGINT)
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline and any(alive_on_machine(str(pid), sweep.logs) for pid in ours):
        time.sleep(0.05)
    for pid in ours:
        if alive_on_machine(str(pid), sweep.logs):  # the pid may be another's by now
            _kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does: what runs here is ended first."""

    def leave(number: int, frame: types.FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave) if threading.current_thread() is threading.main_thread() else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def cancel(sweep: SweepFolder) -> list[PointState]:
    """Cancel every job that waits or runs; what they saved stays for ``resume``. The states before."""
    sweep.settings()
    (sweep.path / CANCEL).touch()
    states = [s for s in point_states(sweep) if s.state in ("running", "pending", "requeued", "unknown")]
    for state in states:
        (state.folder.path / "cancelled").write_text("")
    on_slurm = [s.job for s in states if s.folder.submission.get("executor") == "slurm"]
    cancel_in_slurm(on_slurm)
    end_on_machine(sweep, [s.job for s in states if s.job not in on_slurm])
    return states
