"""Executors, and collecting the results of a sweep, with a faked Slurm."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args, get_type_hints

import tyro

from nestpipe.commands.sweep import Command, Submit
from nestpipe.measurement.record import METRICS, Store
from slurm.collect import collect
from slurm.executors import EXECUTORS
from slurm.folder import SweepFolder, write_json
from slurm.grid import JobCluster, load_grid
from slurm.status import counts, point_states
from tests.support.paths import ROOT
from tests.support.sweep_commands import GRID, finish, nestpipe, record, submit


def test_the_command_line_names_every_executor():
    (option,) = (f for f in dataclasses.fields(Submit) if f.name == "executor")
    assert sorted(get_args(get_type_hints(Submit)["executor"])) == sorted(EXECUTORS) and option.default in EXECUTORS


def test_every_executor_knows_and_ends_only_jobs_that_exist(slurm, sweep):
    for make in EXECUTORS.values():
        executor = make(sweep)
        assert executor.alive(["101", "999999999"]) == {}
        executor.cancel([])


def test_a_job_of_an_executor_that_this_version_lacks_counts_as_lost(slurm, sweep, capsys):
    submit(capsys)
    folder = sweep.points()[0]
    write_json(folder.path / "submission.json", {"executor": "cloud", "job": "1", "time": 0.0})
    assert counts(point_states(sweep)) == "8 points: 7 pending, 1 lost"


def test_submitting_watching_and_cancelling_import_no_torch():
    """Login nodes are slow, and a pickled job must not need torch before its flag is ready."""
    code = "import sys, slurm.sweep, slurm.status, slurm.job; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_collect_is_idempotent_and_one_bad_file_costs_only_itself(slurm, sweep, capsys):
    submit(capsys)
    folders = sweep.points()
    for seed, folder in enumerate(folders[:4]):
        finish(slurm, folder, seed)
    path = folders[3].result
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    assert nestpipe(capsys, "collect", "grid", "--store", "store")[1].startswith("3 new records and 0 known ones")
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in Path("store").iterdir()}
    status, out, _ = nestpipe(capsys, "collect", "grid", "--store", "store")
    assert status == 1 and "0 new records and 3 known ones" in out and path.name in out
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in Path("store").iterdir()} == before
    path.write_text(whole)
    assert collect(sweep, Path("store")).new == 1
    assert {r.seed for r in Store(Path("store")).read()[0]} == {0, 1, 2, 3}


def test_a_store_that_cannot_be_written_is_one_line_and_loses_nothing(slurm, sweep, capsys):
    submit(capsys)
    finish(slurm, sweep.points()[0], 1)
    Path("store").write_text("a file in the way")
    status, _, err = nestpipe(capsys, "collect", "grid", "--store", "store")
    assert status == 1 and err.count("\n") == 1 and "cannot write into the store store" in err
    assert sweep.points()[0].result is not None


def test_collect_of_2000_records(tmp_path, monkeypatch):
    sweep = SweepFolder(tmp_path / "sweep")
    metrics = {name: [1.5] * 50 for name in METRICS}
    example = dataclasses.replace(record(), steps=list(range(50)), metrics=metrics, losses=[1.0] * 50)
    for seed in range(2000):
        folder = sweep.point(f"{seed:012x}").path / "result"
        folder.mkdir(parents=True)
        text = json.dumps(dataclasses.replace(example, seed=seed).to_json(), indent=1)
        (folder / f"measured-nestpipe-{seed:016x}.json").write_text(text)
    start = time.process_time()
    assert collect(sweep, tmp_path / "store").new == 2000
    assert time.process_time() - start < 5  # of this process: what else the machine does is not the fault of collect
    assert collect(sweep, tmp_path / "store").same == 2000


def test_cluster_settings_survive_the_folder(tmp_path):
    grid = dataclasses.replace(
        load_grid((tmp_path / "grid.toml").write_text(GRID) and tmp_path / "grid.toml"),
        cluster=JobCluster(setup=("module load a", "b"), mem_gb=3),
    )
    sweep = SweepFolder(tmp_path / "sweep")
    sweep.write_settings(grid, "slurm")
    assert sweep.settings() == ("grid", "slurm", grid.cluster)


def test_the_grid_and_the_commands_of_the_page_are_valid(tmp_path):
    """Its grid can be loaded and its commands can be parsed."""
    page = (ROOT / "slurm" / "README.md").read_text()
    (toml,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    (tmp_path / "my.toml").write_text(toml)
    grid = load_grid(tmp_path / "my.toml")
    assert len(grid.points) == 6 and grid.cluster.setup == ("module load cuda",)
    lines = re.findall(r"^(?:\.venv/bin/)?nestpipe sweep ([^#\n&]*)", page, re.M)
    assert len(lines) >= 6
    for line in lines:
        assert tyro.cli(Command, args=shlex.split(line), config=(tyro.conf.OmitArgPrefixes,))
    assert len(page.splitlines()) < 110
