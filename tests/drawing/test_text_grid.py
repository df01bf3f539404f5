"""The grid that ``nestpipe schedule`` prints."""

from __future__ import annotations

import re

import pytest

from baselines.torchrec.schedules import torchrec_schedule
from nestpipe.drawing.text_grid import grid
from nestpipe.schedule.frozen_window import fwp_only
from nestpipe.schedule.templates import dbp_only, nestpipe, serial


def lanes(template) -> dict[str, str]:
    rows = {name.strip(): row for name, row in (line.split("|", 1) for line in grid(template).splitlines())}
    return {name: row.rstrip("|") for name, row in rows.items()}


@pytest.mark.parametrize(
    "template",
    [
        serial(),
        serial(4),
        nestpipe(1),
        nestpipe(4),
        nestpipe(8, received=1),
        dbp_only(),
        fwp_only(4),
        torchrec_schedule(),
    ],
    ids=lambda t: f"{t.name}-{t.micro_batches}",
)
def test_rows_are_lanes_of_one_width_and_compute_is_whole(template):
    rows = lanes(template)
    assert set(rows) == set(template.lanes)
    assert len({len(row) for row in rows.values()}) == 1
    compute = re.findall(r"[FBUSO](?:[+-]\d+)?(?:\.\d+)?", rows["compute"])
    assert compute == [op.ref.relative() for op in template.ops if op.lane == "compute"]


def test_serial_shows_every_operation_once_and_idle_compute_as_dots():
    rows = lanes(serial())
    named = re.findall(r"<?[A-Z](?:[+-]\d+)?(?:\.\d+)?", " ".join(rows.values()))
    assert sorted(named) == sorted(["P", "H", "K", "R", "E.1", "F.1", "B.1", "G.1", "A", "U", "O", "W-1"])
    assert rows["compute"].startswith("....") and "." not in rows["compute"][rows["compute"].index("U") :]


def test_nestpipe_looks_ahead():
    rows = lanes(nestpipe(4))
    assert "P+4" in rows["input"] and "R+1" in rows["rows"] and "W-1" in rows["rows"] and "K+2" in rows["keys"]
    idle = [len(run) for run in re.findall(r"\.{2,}", rows["compute"])]
    assert len(idle) == 1  # during the last gradient exchange; in these units the first exchange hides behind O


def test_what_began_before_the_step_is_marked():
    assert "<" in "".join(lanes(fwp_only(4)).values()) or "<" in "".join(lanes(torchrec_schedule()).values())


def test_a_narrow_terminal_shows_the_same_step_in_pieces():
    whole, narrow = grid(nestpipe(4)), grid(nestpipe(4), columns=60)
    assert max(map(len, narrow.splitlines())) <= 60 < max(map(len, whole.splitlines()))

    def rows(text: str) -> dict[str, str]:
        return {lane: cells[:-1] for lane, cells in (line.split("|", 1) for line in text.splitlines())}

    pieces = [rows(block) for block in narrow.split("\n\n")]
    assert {lane: "".join(piece[lane] for piece in pieces) for lane in pieces[0]} == rows(whole)
