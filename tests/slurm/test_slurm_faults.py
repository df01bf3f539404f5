"""Sweeps on a real Slurm on this machine: every fault that only the signal can save.

``make test-slurm`` runs them.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from nestpipe.measurement.record import Store
from slurm.folder import SweepFolder
from slurm.status import point_states
from tests.support.local_slurm import (
    ROOT,
    kill_node,
    nestpipe,
    start_node,
    wait_for,
)
from tests.support.slurm_runs import (
    progress,
    records,
    same_losses,
    states,
    submit,
    undisturbed,
    wait_for_steps,
    wait_until,
    write_grid,
)

pytestmark = pytest.mark.timeout(1500)


def preempt(*more: str) -> str:
    """Submit a job to the higher partition that needs every node. Returns its id."""
    words = ["sbatch", "-p", "high", "-N", "4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 5", *more]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1]


@pytest.mark.slow
def test_preempted_by_a_higher_partition(real_slurm, folder, tmp_path):
    grid = write_grid(tmp_path / "grid.toml", steps=100, pace=150, methods=("serial", "nestpipe"))
    submit(grid, folder)
    points = SweepFolder(folder).points()
    wait_for(lambda: all(p.progress.get("step", 0) >= 10 for p in points), 300, "ten steps of both")
    preempt()
    saved = "*/*/step-*/manifest.json"
    wait_for(lambda: all(list(p.checkpoints.glob(saved)) for p in points), 60, "a checkpoint of both")
    wait_for(lambda: states(folder) == "2 points: 2 requeued", 60, "the jobs to be requeued")
    stopped = {p.submission["job"]: p.progress["step"] for p in points}
    wait_until(folder, "2 done")
    for job, step in stopped.items():
        assert step >= 10
        assert f"resuming after step {step}" in (folder / "logs" / f"{job}_0_log.out").read_text()
    wait_for(lambda: not any(p.checkpoints.exists() for p in points), 30, "the checkpoints to go")
    assert same_losses(records(folder), undisturbed(grid, folder))


@pytest.mark.slow
def test_time_limit_requeues_and_then_gives_up(real_slurm, folder, tmp_path):
    grid = write_grid(tmp_path / "grid.toml", steps=2000, pace=200, minutes=2)
    submit(grid, folder)
    wait_until(folder, "1 requeued", 200)
    first = progress(folder)["step"]
    wait_until(folder, "1 gave up", 300)
    assert progress(folder)["step"] > first > 0 and progress(folder)["restarts"] == 1
    shown = nestpipe("status", str(folder), check=False)
    assert "gave up: its time limit of 2 min ended it more often than max_timeouts allows" in shown
    # With more time it continues from its last step.
    second = progress(folder)["step"]
    nestpipe("resume", str(folder), "--time", "30")
    wait_for_steps(folder, second + 1)
    assert progress(folder)["step"] < second + 200
    nestpipe("cancel", str(folder))
    wait_until(folder, "1 cancelled", 60)


@pytest.mark.slow
def test_scancel_saves_and_resume_continues(real_slurm, folder, tmp_path):
    grid = write_grid(tmp_path / "grid.toml", steps=120, pace=100)
    submit(grid, folder)
    wait_for_steps(folder, 15)
    (point,) = SweepFolder(folder).points()
    subprocess.run(["scancel", point.submission["job"]], check=True)
    wait_until(folder, "1 cancelled", 90)
    assert list(point.checkpoints.glob("*/*/step-*/manifest.json"))
    assert "1 points submitted" in nestpipe("resume", str(folder))
    wait_until(folder, "1 done")
    assert same_losses(records(folder), undisturbed(grid, folder))


@pytest.mark.slow
@pytest.mark.parametrize("node", ["first", "second"])
def test_a_node_dies_with_its_job(real_slurm, folder, tmp_path, node):
    grid = write_grid(tmp_path / "grid.toml", steps=100, pace=100)
    submit(grid, folder)
    wait_for_steps(folder, 10)
    (point,) = SweepFolder(folder).points()
    job = point.submission["job"]
    found = subprocess.run(["squeue", "-h", "-j", job, "-o", "%N"], capture_output=True, text=True).stdout.strip()
    hosts = subprocess.run(["scontrol", "show", "hostnames", found], capture_output=True, text=True).stdout.split()
    dead = hosts[0 if node == "first" else 1]
    kill_node(real_slurm, dead)
    try:
        # Slurm requeues the job when it notices. If the other ranks fail before that, resume finishes it.
        wait_for(lambda: "1 running" not in states(folder), 120, "the loss to be noticed")
        deadline = time.monotonic() + 300
        while states(folder) != "1 points: 1 done":
            assert time.monotonic() < deadline, f"{states(folder)}: {point_states(SweepFolder(folder))}"
            if any(word in states(folder) for word in ("failed", "lost")):
                nestpipe("resume", str(folder))
            time.sleep(1)
    finally:
        start_node(dead)
    assert same_losses(records(folder), undisturbed(grid, folder))


@pytest.mark.slow
def test_a_task_that_raises_costs_its_own_point_only(real_slurm, folder, tmp_path):
    path = f"export PYTHONPATH={ROOT / 'tests' / 'slurm' / 'faults'}:$PYTHONPATH"
    fault = f'setup = ["{path}", "[[ $SLURM_ARRAY_TASK_ID == 1 ]] && export NESTPIPE_FAULT_RANK=3 || true"]'
    grid = write_grid(tmp_path / "grid.toml", steps=20, methods=("serial", "nestpipe"), more=fault)
    submit(grid, folder)
    wait_until(folder, "2 points: 1 done, 1 failed")
    shown = nestpipe("status", str(folder), check=False)
    assert "rank 3: ArithmeticError: a fault made by a test" in shown
    assert 'raise ArithmeticError("a fault made by a test")' in shown
    healthy = write_grid(tmp_path / "grid.toml", steps=20, methods=("serial", "nestpipe"))
    assert "1 points submitted" in nestpipe("resume", str(folder), "--setup", "true")
    wait_until(folder, "2 points: 2 done")
    assert same_losses(records(folder), undisturbed(healthy, folder))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MB; ``fill`` leaves nothing free on it."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> Path:
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(b"\0" * size)
            except OSError:
                size //= 2
    return path


@pytest.mark.slow
def test_a_full_disk_under_the_sweep_and_under_the_store(real_slurm, folder, small_disk, tmp_path):
    grid = write_grid(tmp_path / "grid.toml", steps=100, pace=100)
    sweep = small_disk / "sweep"
    submit(grid, sweep)
    wait_for_steps(sweep, 10)
    filler = fill(small_disk)
    wait_for(lambda: "1 lost" in states(sweep) or "1 failed" in states(sweep), 200, "the job to fail")
    filler.unlink()
    assert "No space left on device" in nestpipe("status", str(sweep), check=False)
    nestpipe("resume", str(sweep))
    wait_until(sweep, "1 done")

    filler = fill(small_disk)
    words = ["collect", str(sweep), "--store", str(small_disk / "store")]
    said = nestpipe(*words, check=False)
    assert "cannot write into the store" in said and "No space left on device" in said and said.count("\n") == 1
    filler.unlink()
    assert "1 new records" in nestpipe(*words)
    (seen,), skipped = Store(small_disk / "store").read()
    assert not skipped and list(seen.losses) == list(next(iter(undisturbed(grid, folder).values())).losses)
