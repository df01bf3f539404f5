"""Calls Slurm's commands sbatch, squeue and scancel, and reads their answers. sacct is never needed."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

from slurm.folder import SweepError
from slurm.grid import JobCluster
from slurm.job import PointJob

#: Seconds to wait for squeue: a busy controller may take a while.
SQUEUE_S = 30.0

#: States that squeue may show for a while after a job has ended.
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "SPECIAL_EXIT",
    "TIMEOUT",
}


def sbatch_parameters(cluster: JobCluster, nodes: int, tasks: int, name: str) -> dict[str, Any]:
    """The arguments of ``SlurmExecutor.update_parameters`` for one job shape."""
    chosen: dict[str, Any] = {
        "job_name": name,
        "time": cluster.time,
        "nodes": nodes,
        "ntasks_per_node": tasks,
        "signal_delay_s": cluster.signal_delay_s,
        "array_parallelism": cluster.parallelism,
        # A rank that fails ends its job: the others may wait for it inside a collective forever.
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


def sbatch_text(cluster: JobCluster, nodes: int, tasks: int, name: str, count: int, logs: Path) -> str:
    """What ``submit_array`` would pass to sbatch for ``count`` points of one shape."""
    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(logs))}"
    parameters = sbatch_parameters(cluster, nodes, tasks, name)
    return _make_sbatch_string(command, logs, map_count=count if count > 1 else None, **parameters)


def require_slurm() -> None:
    """Raises SweepError on a host without Slurm's commands."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise SweepError("no sbatch here: run this on a host of the cluster, or choose --executor local")


def submit_array(
    jobs: Sequence[PointJob], cluster: JobCluster, nodes: int, tasks: int, name: str, logs: Path
) -> list[str]:
    """Submit ``jobs``, all of one shape, as one array. Returns their ids in order. Raises SweepError in one line."""
    executor = SlurmExecutor(folder=logs, max_num_timeout=cluster.max_timeouts)
    executor.update_parameters(**sbatch_parameters(cluster, nodes, tasks, name))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what sbatch says, and raises it
            return [job.job_id for job in executor.submit_array(list(jobs))]
    except submitit.core.utils.FailedJobError as error:  # sbatch refused
        raise SweepError(f"sbatch refused {len(jobs)} jobs: {_errors(str(error))}") from None


@dataclass(frozen=True)
class QueueState:
    """A job that Slurm still has: its state (``PENDING``, ``RUNNING``, ...), and why it waits."""

    state: str
    reason: str


def queue_states(jobs: Iterable[str]) -> dict[str, QueueState] | None:
    """Those of ``jobs`` that squeue lists and that have not ended; None if Slurm cannot be asked."""
    wanted = set(jobs)
    if not wanted:
        return {}
    numbers = ",".join(sorted({job.split("_")[0] for job in wanted}))
    everything = ["--noheader", "--array", "--states=all", "--format=%i|%T|%r"]
    done = _squeue([*everything, f"--jobs={numbers}"])
    if done and "Invalid job id" in done.stderr:  # if Slurm has forgotten one of the ids, squeue may refuse all
        done = _squeue(everything)
    if done is None or done.returncode:
        return None
    rows = (line.strip().split("|", 2) for line in done.stdout.splitlines())
    found = {row[0]: QueueState(row[1], row[2]) for row in rows if len(row) == 3}
    return {job: found[job] for job in wanted & set(found) if found[job].state not in ENDED}


def _squeue(options: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """The finished call of squeue; None if squeue is missing or does not answer in time."""
    try:
        return subprocess.run(["squeue", *options], capture_output=True, text=True, timeout=SQUEUE_S)
    except (OSError, subprocess.SubprocessError):
        return None


def scancel(jobs: Sequence[str]) -> None:
    """Cancel ``jobs``. Raises SweepError if scancel cannot be run or refuses."""
    if not jobs:
        return
    try:
        done = subprocess.run(["scancel", *jobs], capture_output=True, text=True, timeout=SQUEUE_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise SweepError(f"cannot run scancel: {error}") from None
    if done.returncode:
        raise SweepError(f"scancel: {_errors(done.stderr)}")


def _errors(text: str) -> str:
    """What a command of Slurm said, in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    worst = [re.sub(r"^s\w+: error: ", "", line) for line in lines if re.match(r"s\w+: error: ", line)]
    return "; ".join(worst or lines[-1:]) or "no reason given"
