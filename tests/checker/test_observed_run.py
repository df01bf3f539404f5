"""Compares a recorded run with a declared schedule, using the file that ``nestpipe run --trace`` writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nestpipe import cli
from nestpipe.measurement.trace import Span, perfetto_json, scheduled_timeline, spans_of_perfetto
from nestpipe.schedule.operations import Schedule
from nestpipe.schedule.templates import nestpipe, serial
from nestpipe.simulator.virtual_lanes import virtual_timeline

STEPS = 6


def spans_of_a_run(schedule: Schedule, seed: int, first: int = 0) -> list[Span]:
    """The spans of an engine that stops after ``STEPS`` steps, with what it had prefetched for later batches."""
    ops = schedule.unroll(STEPS + 5)
    timeline = virtual_timeline(ops, np.random.default_rng(seed).exponential(1e-3, (len(ops), 1)))
    return [
        Span(op.ref.stage, op.ref.batch + first, op.ref.micro, op.lane, round(start * 1e9), round(end * 1e9))
        for op, (start,), (end,) in zip(ops, timeline.start, timeline.end, strict=True)
        if op.ref.batch - schedule.places[op.ref.in_step()].offset < STEPS
    ]


def write_trace(path: Path, schedule: Schedule, spans: list[Span]) -> str:
    ops = [op.shifted(min(s.batch for s in spans)) for op in schedule.unroll(STEPS + 5)]
    path.write_text(perfetto_json([scheduled_timeline(ops, [spans], [1234.5])], schedule.name))
    return str(path)


def test_a_trace_reads_back() -> None:
    schedule = nestpipe(2)
    spans = spans_of_a_run(schedule, 1)
    (found,) = spans_of_perfetto(perfetto_json([scheduled_timeline(schedule.unroll(11), [spans], [77.0])], "x"))
    begin = min(s.start for s in spans)
    for one, other in zip(sorted(found), sorted(spans), strict=True):
        assert one[:4] == other[:4]
        assert abs(one.start - other.start + begin) <= 2 and abs(one.end - other.end + begin) <= 2


@pytest.mark.parametrize("first", [0, 30])
def test_a_run_that_followed_its_schedule_is_allowed(tmp_path: Path, capsys, first: int) -> None:
    for seed, schedule in enumerate((nestpipe(4), serial())):
        file = write_trace(tmp_path / "t.json", schedule, spans_of_a_run(schedule, seed, first))
        assert cli.main(["schedule", schedule.name, "--trace", file]) == 0, capsys.readouterr().out
        assert "followed the schedule, 6 steps on 1 ranks" in capsys.readouterr().out


def late_synchronisation(s: Span) -> Span | None:
    return s._replace(start=s.start + 10**9, end=s.end + 10**9) if s.stage == "S" and s.batch == 3 else s


def no_write_back(s: Span) -> Span | None:
    return None if s.stage == "W" and s.batch == 2 else s


def other_lane(s: Span) -> Span | None:
    return s._replace(lane="elsewhere") if s.stage == "R" else s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (late_synchronisation, "E3.1 is declared to wait for S3, but began before it ended"),
        (no_write_back, "W2 is declared but was not seen"),
        (other_lane, "R1 ran on lane elsewhere, but its declared lane is rows"),
    ],
)
def test_a_run_that_did_not_follow_its_schedule_is_refused(tmp_path: Path, capsys, change, message: str) -> None:
    schedule = nestpipe(2)
    spans = [changed for s in spans_of_a_run(schedule, 3) if (changed := change(s)) is not None]
    file = write_trace(tmp_path / "t.json", schedule, spans)
    assert cli.main(["schedule", "nestpipe", "--trace", file, "--all"]) == 1
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": []}'])
def test_what_is_not_a_trace_is_refused_in_one_line(tmp_path: Path, capsys, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    assert cli.main(["schedule", "nestpipe", "--trace", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
