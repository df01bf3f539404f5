"""A run whose loss is no longer a number says so wherever its results are shown, and its files stay valid."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from nestpipe.cli import main
from nestpipe.commands.run import _remarks
from nestpipe.measurement.record import RecordError, Store, diverged, record_from_json
from nestpipe.training.convergence import write_curve
from results.figures.fig6_convergence import fig6
from results.sources import Sources
from results.tables.table1 import _losses_say
from tests.support.made_records import measured
from tests.training.test_convergence import curves

BAD = [3.0, math.inf, math.nan]


def test_the_sentence_names_the_first_bad_step():
    assert diverged("serial", [3.0, 2.0]) == "" == diverged("serial", [])
    assert "serial DIVERGED: the loss of step 2 of 3 is not a finite number" in diverged("serial", BAD)


def test_a_record_of_it_is_json_and_the_same_when_read(tmp_path):
    record = replace(measured("serial", [9.0, 8.0]), losses=BAD, evaluation={"HR@10": math.nan})
    text = Store(tmp_path).write(record).read_text()
    assert "NaN" not in text and "Infinity" not in text and json.loads(text)["losses"] == [3.0, None, None]
    (again,), skipped = Store(tmp_path).read()
    assert not skipped and again.diverged == record.diverged != "" and math.isnan(again.evaluation["HR@10"])
    old = json.loads(json.dumps(record.to_json()))  # as earlier versions wrote it
    assert record_from_json(old).diverged == record.diverged


@pytest.mark.parametrize("value", [math.nan, math.inf, None, 10**400])
def test_a_time_that_is_not_a_number_is_refused_and_not_left_out_of_medians(value):
    data = {**json.loads(json.dumps(measured("serial", [9.0, 8.0]).to_json())), "step_ms": [value, 8.0]}
    with pytest.raises((RecordError, OverflowError), match=r"step_ms|too large"):
        record_from_json(data, "there.json")


def test_the_commands_and_the_report_say_so(tmp_path, capsys):
    good, bad = measured("serial", [9.0, 8.0]), replace(measured("nestpipe", [7.0, 8.0]), losses=BAD)
    told = replace(bad, notes=[bad.diverged])
    with np.errstate(all="raise"):
        assert any("nestpipe DIVERGED" in line for line in _remarks([good, told]))
    for record in (good, bad):
        Store(tmp_path / "records" / "store").write(record)
    assert main(["report", "--folder", str(tmp_path), "--only", "records"]) == 0
    assert "store: nestpipe DIVERGED" in capsys.readouterr().out
    assert "no run next to serial" in _losses_say("nestpipe", False, [good, bad])[0]  # it confirms nothing


def test_figure_6_marks_it(tmp_path):
    for curve in curves(nestpipe=1e-8):
        spoilt = replace(curve, losses=[*curve.losses[:-2], math.nan, math.nan])
        path = write_curve(tmp_path / "convergence", spoilt if (curve.method, curve.seed) == ("nestpipe", 2) else curve)
        assert "NaN" not in path.read_text()
    sources = Sources({}, (), tmp_path)
    (table,) = fig6(sources).tables
    assert "NestPipe (DIVERGED with 1 of 3 seeds)" in list(table.frame["method"])
    assert len(sources.diverged()) == 1 and "nestpipe, seed 2" in sources.diverged()[0]
    assert list(table.frame["no more than rounding"]) == ["-", "-", "no"]
