"""What `nestpipe run` prints and writes around a run; nothing is trained."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from nestpipe.commands import run as command
from nestpipe.commands.run import _remarks, _table
from nestpipe.measurement.record import Record, Store
from nestpipe.testbed.testbed import TestbedUnavailable
from nestpipe.training.measured_record import MethodRun
from tests.support.made_records import measured


def shown(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue()


def test_a_run_says_what_it_trained_and_what_it_cannot_show():
    on_loopback = [
        replace(measured(m, [2.0, 3.0], paced=False, micro_batches=n), losses=[1.0], testbed="loopback")
        for m, n in (("serial", 1), ("nestpipe", 8))
    ]
    assert "synthetic data, batch 64 per rank; hstu, dim 128" in _table(on_loopback).caption
    assert any(line.startswith("On loopback without --pace-dense") for line in _remarks(on_loopback))
    untimed = [replace(r, steps=(), metrics={}) for r in on_loopback]
    assert _remarks(untimed)[0].startswith("No step was timed")
    assert "speed-up" in shown(_table(on_loopback)) and "speed-up" not in shown(_table(untimed))


def test_without_root_the_run_falls_back_to_loopback_and_says_so(monkeypatch, capsys):
    asked = []

    def run(config, progress):
        asked.append(config.testbed)
        if config.testbed != "loopback":
            raise TestbedUnavailable("needs root")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", run)
    with pytest.raises(KeyboardInterrupt):
        command.main(["--testbed", "netns:200mbit,1ms"])
    assert asked == ["netns:200mbit,1ms", "loopback"]
    assert "needs root" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_in_the_end_does_not_cost_the_others(tmp_path, monkeypatch):
    metrics = {"step_ms": [1.0]}
    config = {"micro_batches": 1, "data": {}, "model": {}}
    record = Record("measured", "serial", None, 1, 1, config, [4], metrics, losses=[1.0], notes=[])
    monkeypatch.setattr(command, "run", lambda config, progress: [MethodRun(record, [])])
    monkeypatch.setattr(command, "require_writable", lambda path: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        command.main(["--json", str(tmp_path / "file" / "x.json"), "--store", str(tmp_path / "store")])
    assert Store(tmp_path / "store").read()[0] == [record]
