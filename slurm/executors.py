"""Where the points of a sweep run: on a Slurm cluster, on this machine, or in this process for debugging."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import submitit

from nestpipe.ranks.sigterm import sigterm_unwinds
from slurm import processes
from slurm.folder import PointFolder, SweepError, SweepFolder
from slurm.grid import JobCluster, by_shape
from slurm.job import PointJob
from slurm.point import Point
from slurm.sbatch import queue_states, require_slurm, scancel, submit_array

#: Called now and then while points run.
Watch = Callable[[], None]


@dataclass(frozen=True)
class JobState:
    """A job that has not ended: it runs, or it waits for ``reason``."""

    running: bool
    reason: str = ""


class Executor(Protocol):
    """What every executor of a sweep's folder can do. ``submit`` records each point's job in the point's folder."""

    def submit(self, points: Sequence[Point], name: str, cluster: JobCluster, watch: Watch) -> list[str]:
        """Start jobs called ``name`` for ``points``. Returns the ids of the jobs that outlive this call: none if the
        points have run by then. Raises SweepError in one line."""
        ...

    def alive(self, jobs: Collection[str]) -> Mapping[str, JobState] | None:
        """Those of ``jobs`` that have not ended, by id; None if that cannot be determined now."""
        ...

    def cancel(self, jobs: Sequence[str]) -> None:
        """End ``jobs``. Raises SweepError in one line."""
        ...


@dataclass(frozen=True)
class Slurm:
    """Job arrays, one per job shape."""

    sweep: SweepFolder

    def submit(self, points: Sequence[Point], name: str, cluster: JobCluster, watch: Watch) -> list[str]:
        require_slurm()
        if len({point.hash for point in points}) < len(points):
            raise SweepError("the same point was submitted twice")
        ids = []
        for (nodes, tasks), group in by_shape(points, cluster).items():
            folders = [self.sweep.point(point.hash) for point in group]
            jobs = [point_job(folder, cluster) for folder in folders]
            started = submit_array(jobs, cluster, nodes, tasks, name, self.sweep.logs)
            for folder, job in zip(folders, started, strict=True):
                folder.write_submission("slurm", job)
            ids += started
        return ids

    def alive(self, jobs: Collection[str]) -> Mapping[str, JobState] | None:
        found = queue_states(jobs)
        if found is None:
            return None
        return {job: JobState(q.state in ("RUNNING", "COMPLETING"), q.reason) for job, q in found.items()}

    def cancel(self, jobs: Sequence[str]) -> None:
        scancel(jobs)


@dataclass(frozen=True)
class Local:
    """Processes of this machine, for ``parallelism`` points at a time. They end with this command."""

    sweep: SweepFolder

    def submit(self, points: Sequence[Point], name: str, cluster: JobCluster, watch: Watch) -> list[str]:
        """On Ctrl-C or SIGTERM the running points are ended."""
        waiting, running = list(points), dict[str, Any]()
        self.sweep.stop_file.unlink(missing_ok=True)
        with sigterm_unwinds():
            try:
                while waiting or running:
                    if self.sweep.stop_file.exists():
                        raise SweepError(f"cancelled; {len(waiting)} points were not started: nestpipe sweep resume")
                    while waiting and len(running) < cluster.parallelism:
                        job = self._start(waiting.pop(0), cluster)
                        running[job.job_id] = job
                    running = {name: job for name, job in running.items() if not job.done()}
                    watch()
                    time.sleep(0.2)
            finally:
                self.cancel(list(running))
        return []

    def _start(self, point: Point, cluster: JobCluster) -> Any:
        """submitit's job, which owns the process that controls it."""
        executor = submitit.LocalExecutor(folder=self.sweep.logs, max_num_timeout=cluster.max_timeouts)
        gpus = {"gpus_per_node": min(cluster.gpus_per_node, point.workers)} if cluster.gpus_per_node else {}
        executor.update_parameters(
            timeout_min=cluster.time,
            tasks_per_node=point.workers,
            signal_delay_s=cluster.signal_delay_s,
            setup=list(cluster.setup),
            **gpus,
        )
        folder = self.sweep.point(point.hash)
        job = executor.submit(point_job(folder, cluster))
        folder.write_submission("local", job.job_id)
        return job

    def alive(self, jobs: Collection[str]) -> Mapping[str, JobState] | None:
        return {job: JobState(running=True) for job in jobs if processes.runs(job, self.sweep.logs)}

    def cancel(self, jobs: Sequence[str]) -> None:
        processes.end(jobs, self.sweep.logs)


@dataclass(frozen=True)
class Debug:
    """One point after the other, started from this process. An error of a run is raised here."""

    sweep: SweepFolder

    def submit(self, points: Sequence[Point], name: str, cluster: JobCluster, watch: Watch) -> list[str]:
        for point in points:
            folder = self.sweep.point(point.hash)
            job = submitit.DebugExecutor(folder=self.sweep.logs).submit(point_job(folder, cluster))
            folder.write_submission("debug", job.job_id)
            # What DebugJob.results() does, except that it would open pdb on an error.
            os.environ["SUBMITIT_DEBUG_JOB_ID"] = job.job_id
            try:
                job.submission().result()
            finally:
                os.environ.pop("SUBMITIT_DEBUG_JOB_ID", None)
        return []

    def alive(self, jobs: Collection[str]) -> Mapping[str, JobState] | None:
        return {}

    def cancel(self, jobs: Sequence[str]) -> None:
        """Nothing to do: such a job ends with the command that runs it."""


#: By the name that ``nestpipe sweep submit --executor`` takes and that a sweep's files store.
EXECUTORS: Mapping[str, Callable[[SweepFolder], Executor]] = {"local": Local, "slurm": Slurm, "debug": Debug}


def point_job(folder: PointFolder, cluster: JobCluster) -> PointJob:
    return PointJob(
        str(folder.path.absolute()), cluster.time * 60.0, float(cluster.signal_delay_s), cluster.checkpoint_every
    )
