"""What a job does: one point, one rank per task. The callable that submitit pickles.

On preemption or at the time limit Slurm sends SIGUSR2 to every task. submitit alone would save on rank 0 inside its
handler, in the middle of a collective. Here the handler of every rank raises a flag only; the ranks agree after a
step, save together, leave the process group, and rank 0 hands over to submitit's handler, which requeues the job.
A plain SIGTERM (scancel, or a preemption without the signal) makes all ranks save and go on until they are killed:
whoever sent it knows whether the job is to come back.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission, UncompletedJobError

from nestpipe.ranks.process import CONSEQUENCE
from slurm.folder import TOLD_TO_STOP, PointFolder, write_json
from slurm.point import Point
from slurm.signals import NOTHING, SAVE_AND_STOP, Agreement, Flag

#: Slurm sends the signal before a time limit up to this much too early (`sbatch --signal`).
EARLY_S = 60.0
PROGRESS_EVERY_S = 1.0
BALLAST_BYTES = 65536


class GaveUp(RuntimeError):
    """The job reached its time limit once too often."""


@dataclass(frozen=True)
class PointJob:
    """Run the point of ``folder`` on the ranks of this job. Picklable; what a rank raises is written down first.

    ``time_s``, ``signal_delay_s``: the job's time limit and how long before it the signal comes. ``collective_s``:
    after so long inside one collective a rank gives up.
    """

    folder: str
    time_s: float
    signal_delay_s: float
    checkpoint_every: int = 0
    collective_s: float = 1800.0

    def __call__(self) -> str | None:
        """Name of the record's file, None on other ranks than 0."""
        folder, job = PointFolder(Path(self.folder)), submitit.JobEnvironment()
        started = time.monotonic()
        try:
            point = folder.point
            if point is None:
                raise FileNotFoundError(f"{folder.path}/point.json cannot be read: was the sweep's folder removed?")
            if job.cluster == "debug":
                return self._run_alone(folder, point)
            flag = Flag()
            stopped, name = self._run_in_group(folder, point, job, flag)
            if stopped and job.global_rank == 0:
                self._requeue(flag.submitit_handler, time.monotonic() - started)
            return name
        except Exception as error:
            write_failure(folder, job.job_id, job.global_rank, error)
            raise

    def checkpoint(self) -> DelayedSubmission:
        """For submitit, when it requeues: the same job; what was saved is found in the point's folder."""
        return DelayedSubmission(self)

    def _run_in_group(self, folder: PointFolder, point: Point, job: Any, flag: Flag) -> tuple[bool, str | None]:
        """Whether the run was told to stop, and the record's file. A rank that fails leaves the group as it is: the
        others may never come to a barrier."""
        join(job, self.collective_s)
        import torch.distributed as dist

        from nestpipe.ranks.process_group import leave_process_group
        from nestpipe.training.loop import Interrupted
        from nestpipe.training.runs import run_in_group

        # Rank 0 looks for all: another host may see a shared file system a moment later.
        found: list[Any] = [None, None]
        if job.global_rank == 0:
            found = [str(folder.result) if folder.result else None, own_checkpoints(folder, job.job_id)]
        dist.broadcast_object_list(found)
        done, saved = found
        if done:
            leave_process_group()
            return False, done
        if job.global_rank == 0:
            # Room to say so, should the disk be full in the end; urandom, since some file systems store no zeros.
            ballast(folder, job.job_id).write_bytes(os.urandom(BALLAST_BYTES))
        agreement, tell = Agreement(), progress_writer(folder, job)

        def after_step(name: str, step: int, total: int, loss: float) -> Any:
            tell(step, total, loss)
            told = agreement.of_all(flag.take())
            if told == NOTHING or step == total:
                return "go"
            tell(step, total, loss, "saved, to be requeued" if told == SAVE_AND_STOP else TOLD_TO_STOP)
            return "stop" if told == SAVE_AND_STOP else "save"

        stopped, path = False, None
        try:
            config = point.run_config(self.collective_s, str(saved), self.checkpoint_every)
            runs = run_in_group(config, after_step)
            path = self._write(folder, runs[0].record, testbed_name(job)) if runs else None
        except Interrupted:
            stopped = True
        agreement.close()
        leave_process_group()
        if job.global_rank == 0:
            ballast(folder, job.job_id).unlink(missing_ok=True)
        return stopped, path

    def _run_alone(self, folder: PointFolder, point: Point) -> str:
        """For the debug executor: ranks started by the launcher, errors in this process."""
        from nestpipe.training.runs import run

        return self._write(folder, run(point.run_config(self.collective_s))[0].record, "loopback")

    def _write(self, folder: PointFolder, record: Any, testbed: str) -> str:
        sweep = {"point": folder.path.name, "host": socket.gethostname()}
        told = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT")
        named = {name: os.environ[name] for name in told if name in os.environ}
        provenance = {**record.provenance, "sweep": {**sweep, **named}}
        path = folder.write_result(dataclasses.replace(record, testbed=testbed, provenance=provenance))
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
        return str(path)

    def _requeue(self, handler: Any, ran_s: float) -> None:
        """Hand over to submitit: it requeues the job and ends this rank. Raises GaveUp where it does not."""
        timed_out = ran_s >= self.time_s - self.signal_delay_s - EARLY_S
        # submitit takes every signal to a job of less than ten minutes for its time limit; a preemption counts none.
        handler.__self__.has_timed_out = lambda: timed_out
        try:
            handler(signal.SIGUSR2, None)
        except UncompletedJobError:
            raise GaveUp(
                f"gave up: its time limit of {self.time_s / 60:g} min ended it more often than max_timeouts allows; "
                "raise time, then 'nestpipe sweep resume' goes on from what was saved"
            ) from None


def own_checkpoints(folder: PointFolder, job: str) -> Path:
    """A folder for the checkpoints of this start of the job, with the newest that an earlier start has left.

    A duplicate of the job, or one whose node is only thought dead, may still write: never into the same folder.
    """
    own = folder.checkpoints / f"{job}-{uuid.uuid4().hex[:8]}"
    earlier = [path for path in folder.checkpoints.glob("*/*/step-*") if (path / "manifest.json").is_file()]
    if earlier:
        newest = max(earlier, key=lambda path: (path.name, path.stat().st_mtime))
        target = own / newest.parent.name / newest.name
        try:
            shutil.copytree(newest, target, copy_function=os.link)  # whole files never change
        except (OSError, shutil.Error):
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(newest, target)
        print(f"going on after step {int(newest.name.removeprefix('step-'))}", flush=True)
    return own


def join(job: Any, timeout_s: float) -> None:
    """Join the process group of this job's tasks."""
    from nestpipe.ranks.process_group import join_process_group

    if job.cluster == "local":
        # Below the range that the system hands out; a job is one process on this machine, so its id is its own.
        port = 20000 + int(job.job_id) % 12000
        places = {"RANK": job.global_rank, "LOCAL_RANK": job.local_rank, "WORLD_SIZE": job.num_tasks}
        os.environ.update({k: str(v) for k, v in places.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    join_process_group(timeout_s=timeout_s)


def testbed_name(job: Any) -> str:
    """How the record calls where it ran: links of a cluster are not those of one machine."""
    return f"slurm:{job.num_nodes}x{job.num_tasks // job.num_nodes}" if job.cluster == "slurm" else "loopback"


def progress_writer(folder: PointFolder, job: Any) -> Callable[..., None]:
    """``tell(step, total, loss, note)`` on every rank; rank 0 writes now and then, and each note, which stays.

    A full disk does not end a run.
    """
    last, said = 0.0, ""
    host, restarts = socket.gethostname(), int(os.environ.get("SLURM_RESTART_COUNT", "0"))

    def tell(step: int, total: int, loss: float, note: str = "") -> None:
        nonlocal last, said
        if job.global_rank or (time.monotonic() - last < PROGRESS_EVERY_S and not note):
            return
        last, said = time.monotonic(), note or said
        state = {"job": job.job_id, "step": step, "of": total, "loss": loss, "host": host, "restarts": restarts}
        try:
            write_json(folder.path / "progress.json", {**state, "note": said, "time": time.time()})
        except OSError as error:
            print(f"cannot write progress: {error}", flush=True)

    return tell


def ballast(folder: PointFolder, job: str) -> Path:
    return folder.path / f"ballast-{job}"


def write_failure(folder: PointFolder, job: str, rank: int, error: Exception) -> None:
    """Leave word of ``error``; where even that cannot be written the task's stderr has it."""
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
        ballast(folder, job).unlink(missing_ok=True)
        write_json(folder.path / "failures" / f"{job}-{rank}.json", data)
    except OSError as full:
        print(f"cannot write the failure down: {full}", flush=True)
