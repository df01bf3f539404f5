"""Timelines from spans, and the Perfetto export."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from nestpipe.measurement.trace import Span, observed_timelines, perfetto, perfetto_json, scheduled_timeline
from nestpipe.schedule.operations import Ref
from nestpipe.schedule.templates import nestpipe, serial
from nestpipe.simulator.virtual_lanes import virtual_timeline

TEMPLATE = nestpipe(4)


@pytest.fixture(scope="module")
def timeline():
    ops = TEMPLATE.unroll(6)
    return virtual_timeline(ops, np.random.default_rng(1).exponential(1e-3, (len(ops), 2)))


def test_trace_is_valid_json_with_the_fields_of_the_format(timeline):
    data = json.loads(perfetto_json([timeline], "nestpipe"))
    assert data["displayTimeUnit"] == "ms"
    slices = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(timeline.refs) * 2
    for event in slices:
        assert event["ts"] >= 0 and event["dur"] >= 0 and event["args"]["skew_us"] >= 0
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["name"] and event["cat"] and event["args"]["stage"]
        assert ("micro_batch" in event["args"]) == ("." in event["name"])


def test_one_track_per_lane_and_rank(timeline):
    events = perfetto([timeline], "nestpipe")["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "nestpipe rank 0", 1: "nestpipe rank 1"}
    tracks = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert len(tracks) == len(set(tracks)) == 2 * len(TEMPLATE.lanes)
    assert {name for _, _, name in tracks} == set(TEMPLATE.lanes)
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == {(pid, tid) for pid, tid, _ in tracks}


def test_times_on_a_track_are_monotone_and_do_not_overlap(timeline):
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in perfetto([timeline], "nestpipe")["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        assert spans == sorted(spans)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans))


def test_timelines_of_single_ranks_are_numbered_consecutively(timeline):
    spans = [Span("F", t, 1, "compute", 10 * t, 10 * t + 5) for t in range(3)]
    events = perfetto(observed_timelines([spans, spans], [0.0, 1.0]), "torchrec")["traceEvents"]
    assert sorted({e["pid"] for e in events}) == [0, 1]
    first = [min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == pid) for pid in (0, 1)]
    assert first == [0.0, pytest.approx(1e6)]


def test_a_trace_without_spans_is_valid():
    assert json.loads(perfetto_json(observed_timelines([[]], [0.0]), "x"))["traceEvents"]


def test_scheduled_timeline_joins_ranks_on_one_clock():
    ops = serial().unroll(2)
    spans = [[Span(*op.ref, op.lane, 10 * i, 10 * i + 4) for i, op in enumerate(ops)] for _ in range(2)]
    timeline = scheduled_timeline(ops, [spans[0], spans[1][:-1]], [0.0, 3e-9])
    assert timeline.refs == tuple(op.ref for op in ops[:-1])  # what a rank did not run is left out
    np.testing.assert_allclose(timeline.start[:, 1] - timeline.start[:, 0], 3e-9)
    collective = timeline.refs.index(Ref("E", 0, 1))
    np.testing.assert_allclose(timeline.ready[collective], timeline.start[collective, 1])
    local = timeline.refs.index(Ref("F", 0, 1))
    np.testing.assert_allclose(timeline.ready[local], timeline.start[local])
    assert timeline.waited_for[1].tolist() == [0, -1]  # H waits only for P


def test_observed_operations_wait_for_what_ended_last_before_them():
    spans = [Span("P", 0, 0, "input", 0, 10), Span("K", 0, 0, "keys", 0, 4), Span("F", 0, 1, "compute", 12, 20)]
    (timeline,) = observed_timelines([spans], [0.0])
    by_name = dict(zip(map(str, timeline.refs), timeline.waited_for[:, 0], strict=True))
    assert timeline.refs[by_name["F0.1"]] == Ref("P", 0)
    assert by_name["P0"] == -1 and by_name["K0"] == -1


def test_an_all2all_inside_a_replica_group_waits_for_nobody_outside_it():
    spans = [[Span("E", 0, 1, "all2all", start, start + 10)] for start in (0, 100, 2, 103)]
    ops = [op for op in nestpipe(1).unroll(1) if op.ref.stage == "E"]
    timeline = scheduled_timeline(ops, spans, [0.0] * 4, groups=2)
    assert (timeline.ready[0] * 1e9).round().tolist() == [2, 103, 2, 103]
    observed = observed_timelines(spans, [0.0] * 4, groups=2)
    assert [round(float(t.ready[0, 0]) * 1e9) for t in observed] == [2, 103, 2, 103]
