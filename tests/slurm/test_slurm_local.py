"""Sweeps on a real Slurm on this machine: from submission to tables, and every fault that only the signal can save.

`make test-slurm` runs all of it (about 15 minutes); `make test` runs the short way through.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from nestpipe.measurement.record import Record, Store
from slurm.folder import SweepFolder
from slurm.grid import find_grid, load_grid
from slurm.status import counts, point_states
from tests.support.local_slurm import (
    ROOT,
    Unavailable,
    cancel_everything,
    kill_node,
    nestpipe,
    slurm_up,
    start_node,
    wait_for,
)

pytestmark = pytest.mark.timeout(1500)

SMALL = """\
[base]
batch_size = 16
micro_batch = 4
negatives = 8
sequence_length = 16
dense_layers = 1
width = 16
data_scale = 0.0002
embedding_dim = 8
steps = {steps}
pace_dense = {pace}

[[sweep]]
method = {methods}
workers = {workers}

[cluster]
tasks_per_node = 2
parallelism = 2
time = {minutes}
signal_delay_s = 30
max_timeouts = 1
# Longer than any of these runs: only the signal can save.
checkpoint_every = 1000000
{more}
"""


def write_grid(path: Path, steps=4, pace=0.0, methods=("nestpipe",), workers=(4,), minutes=20, more="") -> str:
    text = SMALL.format(
        steps=steps, pace=float(pace), methods=json.dumps(methods), workers=list(workers), minutes=minutes, more=more
    )
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Where the local Slurm has its files."""
    try:
        with slurm_up(tmp_path_factory.mktemp("slurm")) as base:
            yield base
    except Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture
def folder(slurm, tmp_path):
    cancel_everything()
    yield tmp_path / "sweep"
    cancel_everything()


def submit(grid: str, folder: Path, *words: str) -> str:
    return nestpipe("submit", grid, "--executor", "slurm", "--folder", str(folder), *words)


def states(folder: Path) -> str:
    return counts(point_states(SweepFolder(folder)))


def wait_until(folder: Path, words: str, seconds: float = 400) -> None:
    def explain() -> str:
        logs = sorted((folder / "logs").glob("*.err"), key=lambda p: p.stat().st_mtime)
        return f"'{words}', found '{states(folder)}': {point_states(SweepFolder(folder))}\n" + "\n".join(
            log.read_text()[-2000:] for log in logs[-2:]
        )

    wait_for(lambda: words in states(folder), seconds, explain)


def progress(folder: Path) -> dict:
    (point,) = SweepFolder(folder).points()
    return point.progress


def wait_for_steps(folder: Path, steps: int) -> None:
    wait_for(lambda: progress(folder).get("step", 0) >= steps, 300, f"step {steps}, found {progress(folder)}")


def records(folder: Path) -> dict[str, Record]:
    """By point's hash, through the store that tables are made from."""
    nestpipe("collect", str(folder), "--store", str(folder) + "-store")
    found, skipped = Store(Path(str(folder) + "-store")).read()
    assert not skipped
    return {r.provenance["sweep"]["point"]: r for r in found}


def undisturbed(grid: str, folder: Path) -> dict[str, Record]:
    """The same points on this machine, nobody disturbing them."""
    other = Path(str(folder) + "-local")
    nestpipe("submit", grid, "--executor", "local", "--folder", str(other))
    return records(other)


def same_losses(a: dict[str, Record], b: dict[str, Record]) -> bool:
    return a.keys() == b.keys() and all(list(a[name].losses) == list(b[name].losses) for name in a)


def preempt(*more: str) -> str:
    """A job of the higher partition that needs every node; its id."""
    words = ["sbatch", "-p", "high", "-N", "4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 5", *more]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1]


# The way through


def test_from_submit_to_a_table(slurm, folder, tmp_path):
    grid = write_grid(tmp_path / "grid.toml", methods=("serial", "nestpipe"), workers=(2, 4))
    assert "4 points submitted" in submit(grid, folder)
    wait_until(folder, "4 points: 4 done")
    on_slurm = records(folder)
    assert {r.testbed for r in on_slurm.values()} == {"slurm:1x2", "slurm:2x2"}
    # Half of them suffice to compare in the short way: those on two nodes.
    two_nodes = {name: r for name, r in on_slurm.items() if r.workers == 4}
    local = undisturbed(write_grid(tmp_path / "local.toml", methods=("serial", "nestpipe")), folder)
    assert same_losses(two_nodes, local)
    assert "0 points submitted, 0 simulated, 4 were here before" in submit(grid, folder)


@pytest.mark.slow
def test_smoke_grid_to_tables_and_figures(slurm, folder, tmp_path):
    assert len(load_grid(find_grid("smoke")).points) == 12
    submit("smoke", folder)
    wait_until(folder, "12 points: 12 done", 900)
    on_slurm, local = records(folder), undisturbed("smoke", folder)
    assert len(on_slurm) == 12 and same_losses(on_slurm, local)
    from nestpipe.cli import main

    assert main(["report", "--records", f"{folder}-store", "--folder", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


# Faults


@pytest.mark.slow
def test_preempted_by_a_higher_partition(slurm, folder, tmp_path):
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
def test_time_limit_requeues_and_then_gives_up(slurm, folder, tmp_path):
    grid = write_grid(tmp_path / "grid.toml", steps=2000, pace=200, minutes=2)
    submit(grid, folder)
    wait_until(folder, "1 requeued", 200)
    first = progress(folder)["step"]
    wait_until(folder, "1 gave up", 300)
    assert progress(folder)["step"] > first > 0 and progress(folder)["restarts"] == 1
    shown = nestpipe("status", str(folder), check=False)
    assert "gave up: its time limit of 2 min ended it more often than max_timeouts allows" in shown
    # With more time it goes on from where it was.
    second = progress(folder)["step"]
    nestpipe("resume", str(folder), "--time", "30")
    wait_for_steps(folder, second + 1)
    assert progress(folder)["step"] < second + 200
    nestpipe("cancel", str(folder))
    wait_until(folder, "1 cancelled", 60)


@pytest.mark.slow
def test_scancel_saves_and_resume_goes_on(slurm, folder, tmp_path):
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
def test_a_node_dies_with_its_job(slurm, folder, tmp_path, node):
    grid = write_grid(tmp_path / "grid.toml", steps=100, pace=100)
    submit(grid, folder)
    wait_for_steps(folder, 10)
    (point,) = SweepFolder(folder).points()
    job = point.submission["job"]
    found = subprocess.run(["squeue", "-h", "-j", job, "-o", "%N"], capture_output=True, text=True).stdout.strip()
    hosts = subprocess.run(["scontrol", "show", "hostnames", found], capture_output=True, text=True).stdout.split()
    dead = hosts[0 if node == "first" else 1]
    kill_node(slurm, dead)
    try:
        # Slurm requeues it when it has noticed, or its other ranks have failed before that, and resume finishes it.
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
def test_a_task_that_raises_costs_its_own_point_only(slurm, folder, tmp_path):
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
    """A file system of 24 MB; `fill` leaves nothing free on it."""
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
def test_a_full_disk_under_the_sweep_and_under_the_store(slurm, folder, small_disk, tmp_path):
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


@pytest.mark.slow
def test_the_same_grid_again_reordered_extended_and_while_pending(slurm, folder, tmp_path):
    path = tmp_path / "grid.toml"
    blocker = subprocess.run(
        ["sbatch", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"], capture_output=True, text=True
    ).stdout.split()[-1]
    submit(write_grid(path, methods=("serial", "nestpipe"), workers=(2,)), folder)
    assert states(folder) == "2 points: 2 pending"
    assert "0 points submitted" in submit(str(path), folder)
    assert "0 points submitted" in submit(write_grid(path, methods=("nestpipe", "serial"), workers=(2,)), folder)
    extended = write_grid(path, methods=("nestpipe", "serial"), workers=(2, 4))
    assert "2 points submitted, 0 simulated, 2 were here before" in submit(extended, folder)
    assert "0 points submitted" in nestpipe("resume", str(folder))
    listed = subprocess.run(["squeue", "-h", "-r", "-t", "PD"], capture_output=True, text=True).stdout
    assert len(listed.splitlines()) == 4
    subprocess.run(["scancel", blocker], check=True)
    wait_until(folder, "4 points: 4 done")
    assert "0 points submitted" in submit(extended, folder)
    assert len(records(folder)) == 4


@pytest.mark.slow
def test_a_duplicate_of_a_job_does_no_harm(slurm, folder, tmp_path):
    from slurm.executors import EXECUTORS

    grid = write_grid(tmp_path / "grid.toml", steps=60, pace=100)
    submit(grid, folder)
    loaded = load_grid(Path(grid))
    EXECUTORS["slurm"](SweepFolder(folder)).submit(loaded.points, "again", loaded.cluster, lambda: None)
    wait_for(lambda: not subprocess.run(["squeue", "-h"], capture_output=True).stdout, 300, "both jobs to end")
    assert states(folder) == "1 points: 1 done"
    assert len(list(SweepFolder(folder).points()[0].path.glob("result/*"))) == 1
    assert same_losses(records(folder), undisturbed(grid, folder))
