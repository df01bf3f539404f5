"""How jobs reach a machine: sbatch parameters, submitit's executors, and which jobs are alive without sacct."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import submitit
from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

from slurm.folder import PointFolder, SweepError, SweepFolder
from slurm.grid import Cluster, by_shape
from slurm.job import PointJob
from slurm.point import Point

Executor = Literal["slurm", "local", "debug"]
#: Seconds after which squeue is given up: a busy controller may take a while.
SQUEUE_S = 30.0


def sbatch_parameters(cluster: Cluster, nodes: int, tasks: int, name: str) -> dict[str, Any]:
    """For ``SlurmExecutor.update_parameters``: one job shape."""
    chosen: dict[str, Any] = {
        "job_name": name,
        "time": cluster.time,
        "nodes": nodes,
        "ntasks_per_node": tasks,
        "signal_delay_s": cluster.signal_delay_s,
        "array_parallelism": cluster.parallelism,
        # A rank that fails ends its job: the others may wait for it inside a collective for ever.
        "srun_args": ["--kill-on-bad-exit=1"],
        "additional_parameters": {"requeue": True},
    }
    for key in ("partition", "account", "constraint", "qos", "gpus_per_node", "cpus_per_task"):
        if value := getattr(cluster, key):
            chosen[key] = value
    if cluster.mem_gb:
        chosen["mem"] = f"{cluster.mem_gb}GB"
    if cluster.setup:
        chosen["setup"] = list(cluster.setup)
    return chosen


def sbatch_text(cluster: Cluster, nodes: int, tasks: int, name: str, count: int, logs: Path) -> str:
    """What ``submit`` would give to sbatch for ``count`` points of one shape."""
    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(logs))}"
    parameters = sbatch_parameters(cluster, nodes, tasks, name)
    return _make_sbatch_string(command, logs, map_count=count if count > 1 else None, **parameters)


def point_job(folder: PointFolder, cluster: Cluster) -> PointJob:
    return PointJob(
        str(folder.path.absolute()), cluster.time * 60.0, float(cluster.signal_delay_s), cluster.checkpoint_every
    )


def submit_to_slurm(sweep: SweepFolder, name: str, points: Sequence[Point], cluster: Cluster) -> list[str]:
    """One array per job shape; job ids in the order of the shapes. Raises SweepError in one line."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise SweepError("no sbatch here: run this on a host of the cluster, or choose --executor local")
    if len({point.hash for point in points}) < len(points):
        raise SweepError("a point stands twice in this submission")
    ids = []
    for (nodes, tasks), group in by_shape(points, cluster).items():
        executor = SlurmExecutor(folder=sweep.logs, max_num_timeout=cluster.max_timeouts)
        executor.update_parameters(**sbatch_parameters(cluster, nodes, tasks, name))
        folders = [sweep.point(point.hash) for point in group]
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what sbatch says, and raises it
                jobs = executor.submit_array([point_job(folder, cluster) for folder in folders])
        except submitit.core.utils.FailedJobError as error:  # sbatch said no
            raise SweepError(f"sbatch refused {len(group)} jobs: {_errors(str(error))}") from None
        for folder, job in zip(folders, jobs, strict=True):
            folder.write_submission("slurm", job.job_id)
            ids.append(job.job_id)
    return ids


def _errors(text: str) -> str:
    """One line of what a command of Slurm said."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    worst = [re.sub(r"^s\w+: error: ", "", line) for line in lines if re.match(r"s\w+: error: ", line)]
    return "; ".join(worst or lines[-1:]) or "no reason given"


def submit_to_machine(sweep: SweepFolder, point: Point, cluster: Cluster) -> Any:
    """Start one point on this machine; submitit's job, which owns the process that controls it."""
    executor = submitit.LocalExecutor(folder=sweep.logs, max_num_timeout=cluster.max_timeouts)
    gpus = {"gpus_per_node": min(cluster.gpus_per_node, point.workers)} if cluster.gpus_per_node else {}
    executor.update_parameters(
        timeout_min=cluster.time,
        tasks_per_node=point.workers,
        signal_delay_s=cluster.signal_delay_s,
        setup=list(cluster.setup),
        **gpus,
    )
    folder = sweep.point(point.hash)
    job = executor.submit(point_job(folder, cluster))
    folder.write_submission("local", job.job_id)
    return job


def run_for_debugging(sweep: SweepFolder, point: Point, cluster: Cluster) -> None:
    """Run one point now, from this process. Raises what the run raises."""
    folder = sweep.point(point.hash)
    job = submitit.DebugExecutor(folder=sweep.logs).submit(point_job(folder, cluster))
    folder.write_submission("debug", job.job_id)
    os.environ["SUBMITIT_DEBUG_JOB_ID"] = job.job_id  # as DebugJob.results() does, which would open pdb on an error
    try:
        job.submission().result()
    finally:
        os.environ.pop("SUBMITIT_DEBUG_JOB_ID", None)


@dataclass(frozen=True)
class QueueState:
    """A job that Slurm still has: ``PENDING``, ``RUNNING`` ..., and why it waits."""

    state: str
    reason: str


def alive_in_slurm(jobs: Iterable[str]) -> dict[str, QueueState] | None:
    """Those of ``jobs`` that squeue still lists; None where Slurm cannot be asked. sacct is never needed."""
    wanted = set(jobs)
    if not wanted:
        return {}
    numbers = ",".join(sorted({job.split("_")[0] for job in wanted}))
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={numbers}", "--format=%i|%T|%r"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_S)
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    if done.returncode:  # of several ids one is forgotten: squeue may refuse them all, so ask for everything
        command = [word for word in command if not word.startswith("--jobs")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_S)
        except (OSError, subprocess.SubprocessError):
            return None
        if done.returncode:
            return None
    rows = (line.strip().split("|", 2) for line in done.stdout.splitlines())
    found = {row[0]: QueueState(row[1], row[2]) for row in rows if len(row) == 3}
    return {job: found[job] for job in wanted & set(found) if found[job].state not in ENDED}


#: States of jobs that squeue may show for a while after their end.
ENDED: Collection[str] = (
    *(
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
    ),
    *("SPECIAL_EXIT", "TIMEOUT"),
)


def alive_on_machine(job: str, logs: Path) -> bool:
    """Whether a process of a local job runs: a job's id is a pid, which must still be of this sweep."""
    try:
        command = Path(f"/proc/{job}/cmdline").read_bytes()  # empty for a zombie
    except OSError:
        return False
    return b"submitit" in command and str(logs.absolute()).encode() in command


def cancel_in_slurm(jobs: Sequence[str]) -> None:
    """Raises SweepError where scancel cannot be run."""
    if not jobs:
        return
    try:
        done = subprocess.run(["scancel", *jobs], capture_output=True, text=True, timeout=SQUEUE_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise SweepError(f"cannot run scancel: {error}") from None
    if done.returncode:
        raise SweepError(f"scancel: {_errors(done.stderr)}")
