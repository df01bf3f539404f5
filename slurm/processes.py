"""Local jobs as processes of this machine: which of them run, and how to end them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

#: Seconds after which a local job that was asked to end is killed.
END_S = 10.0


def runs(job: str, logs: Path) -> bool:
    """Whether a process of a local job runs. A job's id is a pid, which may belong to something else by now: only a
    process that was started with the folder ``logs`` of this sweep counts."""
    try:
        command = Path(f"/proc/{job}/cmdline").read_bytes()  # empty for a zombie
    except OSError:
        return False
    return b"submitit" in command and str(logs.absolute()).encode() in command


def end(jobs: Sequence[str], logs: Path) -> None:
    """End local jobs with their tasks: all of them are asked to end, and those left after END_S are killed."""
    pids = [pid for job in jobs if runs(job, logs) for pid in [int(job), *_descendants(int(job))]]
    for pid in pids:
        _kill(pid, signal.SIGINT)
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline and any(runs(str(pid), logs) for pid in pids):
        time.sleep(0.05)
    for pid in pids:
        if runs(str(pid), logs):
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
