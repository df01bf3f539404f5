"""What a job does: one point, one rank per task. submitit pickles this callable; submitting imports no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import submitit
from submitit.core.utils import DelayedSubmission

from slurm.failures import write_failure
from slurm.folder import PointFolder
from slurm.preemption import Flag, requeue


@dataclass(frozen=True)
class PointJob:
    """Run the point of ``folder`` on the ranks of this job. Picklable. A rank's error is recorded, then raised.

    ``time_s``, ``signal_delay_s``: the job's time limit and how long before it the signal comes. ``collective_s``: the
    time after which a rank gives up inside one collective.
    """

    folder: str
    time_s: float
    signal_delay_s: float
    checkpoint_every: int = 0
    collective_s: float = 1800.0

    def __call__(self) -> str | None:
        """The name of the record's file, None on ranks other than 0."""
        folder, job = PointFolder(Path(self.folder)), submitit.JobEnvironment()
        started = time.monotonic()
        try:
            point = folder.point
            if point is None:
                raise FileNotFoundError(f"{folder.path}/point.json cannot be read: was the sweep's folder removed?")
            flag = None if job.cluster == "debug" else Flag()  # early: importing torch takes seconds
            from slurm.run_on_rank import run_alone, run_in_job  # imports torch, which submitting does without

            if flag is None:
                return run_alone(folder, point, self.collective_s)
            stopped, name = run_in_job(folder, point, job, flag, self.collective_s, self.checkpoint_every)
            if stopped and job.global_rank == 0:
                requeue(flag.submitit_handler, time.monotonic() - started, self.time_s, self.signal_delay_s)
            return name
        except Exception as error:
            write_failure(folder, job.job_id, job.global_rank, error)
            raise

    def checkpoint(self) -> DelayedSubmission:
        """submitit calls this to requeue: the same job, which finds what was saved in the point's folder."""
        return DelayedSubmission(self)
