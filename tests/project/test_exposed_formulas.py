"""The README's table of what each method leaves exposed: its formulas agree with virtual clocks."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest

from nestpipe import cli
from nestpipe.measurement.exposed_time import step_times
from nestpipe.schedule.operations import Schedule
from nestpipe.schedule.stages import STAGES
from nestpipe.schedule.text import parse
from nestpipe.simulator.virtual_lanes import virtual_timeline
from tests.support.paths import ROOT

#: Milliseconds of each stage for a whole batch. They satisfy the conditions that the README states above its table.
STAGE_TIMES = (
    dict(P=5.0, H=3, K=17, R=20, W=11, E=26, G=38, D=9, F=40, B=80, A=5, U=1, S=2, O=0.5),
    dict(P=1.0, H=2, K=30, R=40, W=20, E=60, G=50, D=16, F=60, B=90, A=2, U=3, S=1, O=1.5),
)  # fmt: skip
#: How many batches run, and the steps that are compared, in the middle, since the pipeline fills and drains.
BATCHES, MIDDLE = 24, slice(8, 16)
METHODS = ("serial", "torchrec", "2d-sp", "uniemb", "dbp-only", "fwp-only", "nestpipe", "nestpipe+2d-sp")


def readme_table() -> dict[str, list[str]]:
    """Method -> the cells of its row, as Python expressions."""
    text = (ROOT / "README.md").read_text()
    head = "| method | input and lookup | All2Alls | dense AllReduce | updates |\n"
    rows = text[text.index(head) + len(head) :].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip(" `").replace("\u2212", "-") for cell in row.strip("|").split("|")] for row in rows]
    return {name: formulas for name, *formulas in cells}


def value(formula: str, times: Mapping[str, float], micro_batches: int) -> float:
    assert re.fullmatch(r"[A-Z0 +/()-]+", formula), formula
    names = {**times, "C": times["E"] + times["G"], "N": micro_batches}
    return float(eval(formula, {"__builtins__": {}}, names))


def simulated(schedule: Schedule, times: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of a steady step on one worker, by the names of ``StepTimes``."""
    ops = schedule.unroll(BATCHES)
    n = schedule.micro_batches
    seconds = [times[o.ref.stage] / (n if STAGES[o.ref.stage].per_micro_batch else 1) * 1e-3 for o in ops]
    found = step_times(virtual_timeline(ops, np.array(seconds)[:, None]))
    return {name: float(ms[MIDDLE].mean()) for name, ms in found.ms.items()}


def test_the_table_has_a_row_for_each_method():
    assert tuple(readme_table()) == METHODS


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize("times", STAGE_TIMES)
@pytest.mark.parametrize("method", METHODS)
def test_formulas_are_what_virtual_clocks_give(method, times, micro_batches, capsys):
    assert cli.main(["schedule", method, "--micro-batches", str(micro_batches), "--text"]) == 0
    found = simulated(parse(capsys.readouterr().out), times)
    formulas = [value(cell, times, micro_batches) for cell in readme_table()[method]]
    exposed = [
        found["exposed_input"] + found["exposed_lookup"],
        found["exposed_communication"],
        found["exposed_dense_sync"],
        found["update"],
    ]
    assert exposed == pytest.approx(formulas, abs=1e-6)
    assert found["step"] == pytest.approx(times["F"] + times["B"] + sum(formulas))
