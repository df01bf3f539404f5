"""A method in a separate package, of which this project knows nothing.

Its schedule has a lane with a new name, and replica groups. On the command line it can do all that the shipped methods
can.
"""

from __future__ import annotations

import json
import os
import shlex

import pytest

from nestpipe import cli
from tests.support.paths import ROOT

MODULE = """\
from nestpipe.methods import scheduled_method
from nestpipe.schedule import op, schedule


def make(n):
    ops = [op("P+2"), op("H+2"), op("K+1"), op("W-1"), op("R+1", lane="host")]
    for m in range(1, n + 1):
        ops += [op(f"E.{m}"), op(f"F.{m}"), op(f"B.{m}"), op(f"G.{m}", writes="arrived"), op(f"D.{m}")]
    return schedule("elsewhere", n, [*ops, op("A"), op("U"), op("S+1"), op("O")])


METHOD = scheduled_method("elsewhere", "retrieval on its own lane, tables in replica groups", make)
"""
GRID = """\
[base]
batch_size = 8
micro_batch = 4
steps = 1
embedding_dim = 8
width = 8
heads = 1
negatives = 4
sequence_length = 6
dense_layers = 1
data_scale = 0.0001

[[sweep]]
method = "elsewhere"
workers = [2, 8]

[cluster]
tasks_per_node = 2
max_workers = 2
"""
SMALL = (
    "--batch-size 8 --negatives 4 --embedding-dim 8 --width 8 --heads 1 --sequence-length 6 --dense-layers 1 "
    "--data-scale 0.0001 --micro-batches 2 --rounds 1"
)


@pytest.fixture
def nestpipe(tmp_path, monkeypatch, capsys):
    """``nestpipe(words)`` runs the command with the package installed, and returns what it prints."""
    package = tmp_path / "site"
    about = package / "elsewhere-1.0.dist-info"
    about.mkdir(parents=True)
    (package / "elsewhere_method.py").write_text(MODULE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[nestpipe.methods]\nelsewhere = elsewhere_method:METHOD\n")
    monkeypatch.syspath_prepend(package)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), str(ROOT), os.environ.get("PYTHONPATH", "")]))

    def run(words: str) -> str:
        status = cli.main(shlex.split(words))
        out, error = capsys.readouterr()
        assert status == 0, error
        return out

    return run


def test_a_method_from_outside_is_listed_checked_simulated_and_advised_on(nestpipe, tmp_path):
    assert "elsewhere " in nestpipe("methods")
    assert "elsewhere: synchronous" in nestpipe("schedule elsewhere --check")
    grid = nestpipe("schedule elsewhere --micro-batches 2")
    assert " host |" in grid and "replicas |" in grid

    out = tmp_path / "simulated.json"
    nestpipe(f"simulate --hardware h100-ib --methods serial,elsewhere --workers 128 --steps 2 --json {out}")
    (_, record) = json.loads(out.read_text())["records"]
    assert record["method"] == "elsewhere" and record["config"]["groups"] == 4 and record["median"]["step_ms"] > 0

    advice = tmp_path / "advice.json"
    said = nestpipe(f"advise --hardware h100-ib --methods elsewhere --workers 128 --reach 1 --json {advice}")
    assert "Best synchronous method at 128 workers: elsewhere(" in said
    assert {"host", "replicas", "rows"} <= set(json.loads(advice.read_text())["best"]["limits"])


def test_a_method_from_outside_is_trained_swept_and_reported(nestpipe, tmp_path):
    out, store = tmp_path / "run.json", tmp_path / "records"
    nestpipe(f"run --methods serial,elsewhere --workers 4 --steps 2 {SMALL} --store {store} --json {out}")
    records = json.loads(out.read_text())["methods"]
    assert records["elsewhere"]["losses"] == pytest.approx(records["serial"]["losses"], rel=1e-5)
    assert records["elsewhere"]["median"]["replica_bytes"] > 0

    grid, folder = tmp_path / "grid.toml", tmp_path / "sweep"
    grid.write_text(GRID)
    assert nestpipe(f"sweep preview {grid}").count("elsewhere(2)") == 2
    assert "1 points submitted, 1 simulated" in nestpipe(f"sweep submit {grid} --executor debug --folder {folder}")
    assert "2 new records" in nestpipe(f"sweep collect {folder} --store {store}")

    report = nestpipe(f"report --records {store} --only records")
    lines = [line for line in report.splitlines() if "elsewhere" in line]
    assert len(lines) >= 3, report  # the run, the sweep's real point, the simulated one
