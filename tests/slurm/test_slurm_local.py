"""Sweeps on a real Slurm on this machine, from submission to tables and figures.

``make test-slurm`` runs all of it, and the faults of ``test_slurm_faults`` (about 15 minutes); ``make test`` runs the
first test only.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slurm.folder import SweepFolder
from slurm.grid import find_grid, load_grid
from tests.support.local_slurm import (
    nestpipe,
    wait_for,
)
from tests.support.slurm_runs import (
    records,
    same_losses,
    states,
    submit,
    undisturbed,
    wait_until,
    write_grid,
)

pytestmark = pytest.mark.timeout(1500)


def test_from_submit_to_a_table(real_slurm, folder, tmp_path):
    grid = write_grid(tmp_path / "grid.toml", methods=("serial", "nestpipe"), workers=(2, 4))
    assert "4 points submitted" in submit(grid, folder)
    wait_until(folder, "4 points: 4 done")
    on_slurm = records(folder)
    assert {r.testbed for r in on_slurm.values()} == {"slurm:1x2", "slurm:2x2"}
    # The short test compares only half of them: those on two nodes.
    two_nodes = {name: r for name, r in on_slurm.items() if r.workers == 4}
    local = undisturbed(write_grid(tmp_path / "local.toml", methods=("serial", "nestpipe")), folder)
    assert same_losses(two_nodes, local)
    assert "0 points submitted, 0 simulated, 4 were here before" in submit(grid, folder)


@pytest.mark.slow
def test_smoke_grid_to_tables_and_figures(real_slurm, folder, tmp_path):
    assert len(load_grid(find_grid("smoke")).points) == 12
    submit("smoke", folder)
    wait_until(folder, "12 points: 12 done", 900)
    on_slurm, local = records(folder), undisturbed("smoke", folder)
    assert len(on_slurm) == 12 and same_losses(on_slurm, local)
    from nestpipe.cli import main

    assert main(["report", "--records", f"{folder}-store", "--folder", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_the_same_grid_again_reordered_extended_and_while_pending(real_slurm, folder, tmp_path):
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
def test_a_duplicate_of_a_job_does_no_harm(real_slurm, folder, tmp_path):
    from slurm.executors import EXECUTORS

    grid = write_grid(tmp_path / "grid.toml", steps=60, pace=100)
    submit(grid, folder)
    loaded = load_grid(Path(grid))
    EXECUTORS["slurm"](SweepFolder(folder)).submit(loaded.points, "again", loaded.cluster, lambda: None)
    wait_for(lambda: not subprocess.run(["squeue", "-h"], capture_output=True).stdout, 300, "both jobs to end")
    assert states(folder) == "1 points: 1 done"
    assert len(list(SweepFolder(folder).points()[0].path.glob("result/*"))) == 1
    assert same_losses(records(folder), undisturbed(grid, folder))
