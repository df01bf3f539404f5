"""The state of each point: from its files, and from squeue or the process table for jobs that have no files yet."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm.executors import EXECUTORS, JobState
from slurm.folder import TOLD_TO_STOP, PointFolder, SweepFolder
from slurm.point import Point

#: From best to worst. ``resume`` submits the points of RESUMABLE states again; the jobs of ALIVE ones may run.
STATES = ("done", "running", "pending", "requeued", "unknown", "missing", "cancelled", "gave up", "failed", "lost")
RESUMABLE = ("missing", "cancelled", "gave up", "failed", "lost")
ALIVE = ("running", "pending", "requeued", "unknown")
STDERR_LINES = 6
#: With less disk space than this a job cannot report anything.
FULL_BYTES = 65536
#: Lines of stderr that say nothing about a failure: submitit's own, and torch's last messages.
NOISE = re.compile(r"^submitit (WARNING|INFO|ERROR)|^\[W\d|^terminate called without|^srun: (Job step|error: n)|^\s*$")


@dataclass(frozen=True)
class PointState:
    """``detail``: how far it got, or why it failed. ``stderr``: last lines of the rank that failed first."""

    folder: PointFolder
    point: Point | None
    state: str
    detail: str = ""
    job: str = ""
    stderr: Sequence[str] = ()

    @property
    def title(self) -> str:
        return self.point.title if self.point else "(point.json cannot be read)"


def point_states(sweep: SweepFolder, only: Iterable[str] | None = None) -> list[PointState]:
    """The states of all points ever submitted, or of those with the hashes ``only``."""
    folders = sweep.points() if only is None else [sweep.point(name) for name in only]
    submissions = {folder.path.name: folder.submission for folder in folders}
    jobs: dict[str, list[str]] = {}
    for folder in folders:
        submission = submissions[folder.path.name]
        if submission and not folder.result:
            jobs.setdefault(submission["executor"], []).append(submission["job"])
    alive = {name: EXECUTORS[name](sweep).alive(jobs[name]) for name in jobs if name in EXECUTORS}
    states = []
    for folder in folders:
        submission = submissions[folder.path.name]
        states.append(_state(sweep, folder, submission, alive.get(submission.get("executor", ""), {})))
    return states


def _state(
    sweep: SweepFolder, folder: PointFolder, submission: Mapping[str, Any], alive: Mapping[str, JobState] | None
) -> PointState:
    """``alive``: the jobs of the point's executor that have not ended, None if that is unknown."""
    point, job = folder.point, submission.get("job", "")

    def as_state(state: str, detail: str = "", stderr: Sequence[str] = ()) -> PointState:
        return PointState(folder, point, state, detail, job, stderr)

    if folder.result:
        return as_state("done", "simulated" if point and point.simulated else "")
    if not submission:
        return as_state("missing")
    progress = folder.progress if folder.progress.get("job") == job else {}
    how_far = f"step {progress['step']} of {progress['of']}" if progress else ""
    if alive and job in alive:
        if not alive[job].running:
            return as_state("requeued" if progress else "pending", f"{how_far} {alive[job].reason}".strip())
        notes = [how_far or "starting", progress.get("note", "")]
        notes += [f"restarted {n}x" for n in [progress.get("restarts", 0)] if n]
        return as_state("running", ", ".join(filter(None, notes)))
    failures = folder.failures(job)
    stopped = (folder.path / "cancelled").exists() or progress.get("note") == TOLD_TO_STOP
    # Ranks that are killed one after the other report each other: not a failure if somebody stopped the job.
    if failures and not (stopped and all(f.get("consequence") for f in failures)):
        first = failures[0]
        state = "gave up" if first["what"].startswith("gave up") else "failed"
        return as_state(state, f"rank {first['rank']}: {first['what']}", stderr_tail(sweep.logs, job, first["rank"]))
    if alive is None:
        return as_state("unknown", f"{how_far} squeue does not answer".strip())
    if stopped:
        return as_state("cancelled", how_far)
    why = "its job ended without an error: it was killed, or its node failed"
    if shutil.disk_usage(sweep.path).free < FULL_BYTES:
        why = "its job ended, and the disk under the sweep's folder is full: make room, then resume"
    return as_state("lost", f"{how_far + '; ' if how_far else ''}{why}", stderr_tail(sweep.logs, job, 0))


def stderr_tail(logs: Path, job: str, rank: int) -> list[str]:
    """The last useful lines of a task's stderr, or of the batch script's if the task never started."""
    for path in (logs / f"{job}_{rank}_log.err", logs / f"{job}_0_log.err"):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        if said := [line for line in lines if not NOISE.search(line)]:
            return said[-STDERR_LINES:]
    return []


def counts(states: Sequence[PointState]) -> str:
    """``12 points: 10 done, 2 failed``."""
    parts = [f"{n} {name}" for name in STATES if (n := sum(s.state == name for s in states))]
    return f"{len(states)} points: {', '.join(parts) or 'none'}"
