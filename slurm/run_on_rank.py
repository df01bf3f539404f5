"""One rank's part of a job: join the others, train the point from what an earlier start has saved, write the record."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nestpipe.ranks.process_group import join_process_group, leave_process_group
from nestpipe.training.loop import Interrupted
from nestpipe.training.runs import run, run_in_group
from slurm.failures import drop_ballast, take_ballast
from slurm.flag_agreement import FlagAgreement
from slurm.folder import TOLD_TO_STOP, PointFolder, write_json
from slurm.point import Point
from slurm.preemption import NOTHING, SAVE_AND_STOP, Flag

PROGRESS_EVERY_S = 1.0


def run_in_job(
    folder: PointFolder, point: Point, job: Any, flag: Flag, collective_s: float, checkpoint_every: int
) -> tuple[bool, str | None]:
    """Whether the run was told to stop, and the record's file (None on ranks other than 0).

    ``job``: submitit's JobEnvironment. A rank that fails does not close the group: the others may never reach a
    barrier.
    """
    join(job, collective_s)
    # Rank 0 looks for all ranks: another host may see a change of a shared file system later.
    found: list[Any] = [None, None]
    if job.global_rank == 0:
        found = [str(folder.result) if folder.result else None, own_checkpoints(folder, job.job_id)]
    dist.broadcast_object_list(found)
    done, saved = found
    if done:
        leave_process_group()
        return False, done
    if job.global_rank == 0:
        take_ballast(folder, job.job_id)
    agreement = FlagAgreement()
    tell = progress_writer(folder, job)

    def after_step(name: str, step: int, total: int, loss: float) -> Any:
        tell(step, total, loss)
        told = agreement.of_all(flag.take())
        if told == NOTHING or step == total:
            return "go"
        tell(step, total, loss, "saved, to be requeued" if told == SAVE_AND_STOP else TOLD_TO_STOP)
        return "stop" if told == SAVE_AND_STOP else "save"

    stopped, path = False, None
    try:
        runs = run_in_group(point.run_config(collective_s, str(saved), checkpoint_every), after_step)
        path = _write(folder, runs[0].record, testbed_name(job)) if runs else None
    except Interrupted:
        stopped = True
    agreement.close()
    leave_process_group()
    if job.global_rank == 0:
        drop_ballast(folder, job.job_id)
    return stopped, path


def run_alone(folder: PointFolder, point: Point, collective_s: float) -> str:
    """For the debug executor: the launcher starts the ranks, and errors are raised here. Returns the record's file."""
    return _write(folder, run(point.run_config(collective_s))[0].record, "loopback")


def _write(folder: PointFolder, record: Any, testbed: str) -> str:
    sweep = {"point": folder.path.name, "host": socket.gethostname()}
    told = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT")
    named = {name: os.environ[name] for name in told if name in os.environ}
    provenance = {**record.provenance, "sweep": {**sweep, **named}}
    path = folder.write_result(dataclasses.replace(record, testbed=testbed, provenance=provenance))
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    return str(path)


def own_checkpoints(folder: PointFolder, job: str) -> Path:
    """A folder for the checkpoints of this start of the job, with the newest one that an earlier start has left.

    A duplicate of the job, or one whose node is wrongly thought dead, may still write, but never into the same folder.
    """
    own = folder.checkpoints / f"{job}-{uuid.uuid4().hex[:8]}"
    earlier = [path for path in folder.checkpoints.glob("*/*/step-*") if (path / "manifest.json").is_file()]
    if earlier:
        newest = max(earlier, key=lambda path: (path.name, path.stat().st_mtime))
        target = own / newest.parent.name / newest.name
        try:
            shutil.copytree(newest, target, copy_function=os.link)  # complete files never change
        except (OSError, shutil.Error):
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(newest, target)
        print(f"resuming after step {int(newest.name.split('-')[1])}", flush=True)
    return own


def join(job: Any, timeout_s: float) -> None:
    """Join the process group of this job's tasks."""
    if job.cluster == "local":
        # Below the range that the system assigns. A job is one process on this machine, so its id is unique.
        port = 20000 + int(job.job_id) % 12000
        places = {"RANK": job.global_rank, "LOCAL_RANK": job.local_rank, "WORLD_SIZE": job.num_tasks}
        os.environ.update({k: str(v) for k, v in places.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    join_process_group(timeout_s=timeout_s)


def testbed_name(job: Any) -> str:
    """The testbed's name in the record: links of a cluster are not those of one machine."""
    return f"slurm:{job.num_nodes}x{job.num_tasks // job.num_nodes}" if job.cluster == "slurm" else "loopback"


def progress_writer(folder: PointFolder, job: Any) -> Callable[..., None]:
    """Returns ``tell(step, total, loss, note)``. Rank 0 writes now and then, and at each note; a note stays.

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
