"""A real Slurm on this machine for tests, and what tests do to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT

LOCAL = ROOT / "slurm" / "local"


class Unavailable(RuntimeError):
    """This machine cannot run a Slurm; the message says why."""


@contextmanager
def slurm_up(base: Path) -> Iterator[Path]:
    """Our own Slurm with its files in ``base``. Raises Unavailable, also if a Slurm is up: its jobs are not ours.

    Another process stops it, even if this one is killed: it waits for the end of a pipe.
    """
    if os.geteuid() != 0:
        raise Unavailable("a local Slurm needs root")
    if "UP" in subprocess.run(["sh", "-c", "scontrol ping"], capture_output=True, text=True).stdout:
        raise Unavailable("a Slurm is up here already, and these tests kill jobs and nodes: slurm/local/down first")
    env = {**os.environ, "BASE": str(base), "PURGE": "1"}
    guardian = subprocess.Popen(
        ["bash", "-c", f"read -r _; [[ -e {base}/state ]] && exec {LOCAL}/down"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal must not reach it
        env=env,
    )
    try:
        done = subprocess.run([str(LOCAL / "up")], env=env, capture_output=True, text=True, timeout=300)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise Unavailable(f"a local Slurm does not start here: {reason}")
        yield base
    finally:
        assert guardian.stdin
        guardian.stdin.close()
        guardian.wait(120)


def nestpipe(*words: str, check: bool = True) -> str:
    """Run the command line. Returns stdout and stderr together."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "nestpipe.cli", "sweep", *words],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert not check or done.returncode == 0, done.stdout
    return done.stdout


def wait_for(what: Callable[[], object], seconds: float, words: str) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {words() if callable(words) else words}"
        time.sleep(0.5)


def cancel_everything() -> None:
    """Leave no job behind for the next test."""
    subprocess.run(["scancel", "--user", "root"], capture_output=True)
    subprocess.run(["scancel", "--user", "root", "--signal=KILL"], capture_output=True)
    deadline = time.monotonic() + 60
    while subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout and time.monotonic() < deadline:
        time.sleep(0.3)


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def kill_node(base: Path, node: str) -> None:
    """Do what a power cut does: end slurmd, its stepds and all that they run at once."""
    pids = [int((base / f"slurmd.{node}.pid").read_text())]
    for link in Path("/proc").glob("[0-9]*"):
        try:
            if (link / "comm").read_text().strip() == "slurmstepd" and _has_open(link, base / f"slurmd.{node}.log"):
                pids += [int(link.name), *descendants(int(link.name))]
        except OSError:
            continue
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _has_open(process: Path, file: Path) -> bool:
    """Whether the process is a stepd of the node: it writes to the log of the node's slurmd."""
    return any(os.readlink(link) == str(file) for link in (process / "fd").iterdir())


def start_node(node: str) -> None:
    """Bring a killed node back."""
    subprocess.run(["slurmd", "-N", node], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True)
