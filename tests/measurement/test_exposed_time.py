"""Exposed time: small cases by hand, a simple reference for the walk, and what must hold for every schedule."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.torchrec.schedules import torchrec_schedule
from nestpipe.measurement.exposed_time import EXPOSED, StepTimes, joined, step_times
from nestpipe.measurement.trace import Span, Timeline, observed_timelines, scheduled_timeline
from nestpipe.schedule.frozen_window import fwp_only
from nestpipe.schedule.operations import Schedule
from nestpipe.schedule.stages import STAGES
from nestpipe.schedule.templates import dbp_only, nestpipe, serial
from nestpipe.simulator.virtual_lanes import virtual_timeline

PARTS = ("dense", "update", *(f"exposed_{name}" for name in EXPOSED), "skew", "other")
#: Milliseconds, all different, so that no two stages can be confused.
DIFFERENT = dict(zip("PHKREFBGAUOW", range(1, 13), strict=True)) | {"S": 13}


def run(template: Schedule, ms: Mapping[str, float | list[float]], batches: int = 8) -> Timeline:
    """A run on virtual clocks. ``ms``: by stage, one number or one per rank."""
    ops = template.unroll(batches)
    ranks = max(np.size(value) for value in ms.values())
    rows = [np.broadcast_to(ms[op.ref.stage], ranks) for op in ops]
    return virtual_timeline(ops, np.array(rows, dtype=float) * 1e-3)


def steady(times: StepTimes, step: int = 4) -> dict[str, list[float]]:
    """The values of one step in the middle, per rank, without zeros."""
    at = times.steps.index(step)
    return {name: value[at].round(9).tolist() for name, value in times.ms.items() if value[at].any()}


def test_serial_is_the_sum_of_its_parts():
    lookup = DIFFERENT["H"] + DIFFERENT["K"] + DIFFERENT["R"] + DIFFERENT["W"]
    assert steady(step_times(run(serial(), DIFFERENT))) == {
        "step": [sum(DIFFERENT.values()) - DIFFERENT["S"]],
        "dense": [DIFFERENT["F"] + DIFFERENT["B"]],
        "update": [DIFFERENT["U"] + DIFFERENT["O"]],
        **{key: [DIFFERENT["P"]] for key in ("exposed_input", "input")},
        **{key: [lookup] for key in ("exposed_lookup", "lookup")},
        **{key: [DIFFERENT["E"] + DIFFERENT["G"]] for key in ("exposed_communication", "communication")},
        **{key: [DIFFERENT["A"]] for key in ("exposed_dense_sync", "dense_sync")},
    }


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_nestpipe_exposes_the_first_and_the_last_exchange(micro_batches):
    ms = dict.fromkeys(STAGES, 1.0) | {"F": 10.0, "B": 20.0, "E": 2.0, "G": 2.0, "O": 0.0}
    result = steady(step_times(run(nestpipe(micro_batches), ms, batches=10)))
    assert result["exposed_communication"] == [4.0]
    assert result["communication"] == [4.0 * micro_batches]  # so the exposed ratio is 1 / N
    assert "exposed_lookup" not in result and "exposed_input" not in result and "exposed_dense_sync" not in result
    assert result["step"] == [30.0 * micro_batches + 4.0 + 2.0]  # U and S


def test_the_dense_optimizer_hides_a_part_of_the_first_exchange():
    ms = dict.fromkeys(STAGES, 1.0) | {"F": 10.0, "B": 20.0, "E": 5.0, "G": 2.0, "O": 3.0}
    assert steady(step_times(run(nestpipe(4), ms, batches=10)))["exposed_communication"] == [5.0 - 3.0 + 2.0]


def test_what_is_left_of_a_long_retrieval_and_a_long_allreduce():
    ms = dict.fromkeys(STAGES, 1.0) | {"F": 10.0, "B": 20.0, "R": 100.0}
    # R of the next batch begins when S of this one is done, and the next S waits for it.
    result = steady(step_times(run(dbp_only(), ms, batches=10)))
    assert result["exposed_lookup"] == [100.0 - 1.0 - 30.0 - 1.0 - 1.0]  # it hides E (next to O), F and B, G, U
    ms |= {"R": 1.0, "A": 50.0}
    result = steady(step_times(run(dbp_only(), ms, batches=10)))
    assert result["exposed_dense_sync"] == [50.0 - 3.0]  # it hides G, U, S
    assert result["exposed_communication"] == [1.0]  # G; the first exchange hides behind the AllReduce


def test_a_slow_rank_is_the_other_ranks_skew():
    ms = {name: [float(x)] * 2 for name, x in DIFFERENT.items()} | {"F": [6.0, 11.0]}
    result = steady(step_times(run(serial(), ms)))
    assert result["dense"] == [13.0, 18.0]
    assert result["skew"] == [5.0, 0.0]  # in G, the next collective
    assert result["exposed_communication"] == result["communication"] == [13.0, 13.0]
    assert result["step"] == [83.0, 83.0]


def spans_of(timeline: Timeline, gap_ns: int = 0) -> list[list[Span]]:
    """The timeline as spans, with a gap of ``gap_ns`` before each operation, so that operation i is i gaps late."""

    def at(seconds: float, i: int) -> int:
        return round(seconds * 1e9) + gap_ns * i

    return [
        [
            Span(*ref, lane, at(timeline.start[i, r], i), at(timeline.end[i, r], i))
            for i, (ref, lane) in enumerate(zip(timeline.refs, timeline.lanes, strict=True))
        ]
        for r in range(timeline.ranks)
    ]


def test_gaps_that_nothing_explains_are_other():
    template = serial()
    spans = spans_of(run(template, DIFFERENT), gap_ns=1_000_000)
    result = steady(step_times(scheduled_timeline(template.unroll(8), spans, [0.0])))
    assert result["other"] == [float(len(template.ops))]
    assert result["step"] == [sum(DIFFERENT.values()) - DIFFERENT["S"] + len(template.ops)]


@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(1, 3), gap_us=st.integers(0, 300))
@settings(max_examples=25, deadline=None)
def test_observed_and_scheduled_agree_on_one_thread(seed, ranks, gap_us):
    template = serial(2)
    ops = template.unroll(6)
    durations = np.random.default_rng(seed).integers(0, 5000, (len(ops), ranks)) * 1e-6
    spans = spans_of(virtual_timeline(ops, durations), gap_us * 1000)
    offsets = [0.25 * r for r in range(ranks)]  # each rank's clock is its own
    shifted = [
        [s._replace(start=s.start - int(o * 1e9), end=s.end - int(o * 1e9)) for s in rank]
        for rank, o in zip(spans, offsets, strict=True)
    ]
    scheduled = step_times(scheduled_timeline(ops, shifted, offsets))
    observed = joined([step_times(t) for t in observed_timelines(shifted, offsets)])
    assert scheduled.steps == observed.steps == tuple(range(1, 6))
    for name, values in scheduled.ms.items():
        np.testing.assert_allclose(observed.ms[name], values, atol=1e-6, err_msg=name)


def test_pieces_of_an_observed_operation_add_up():
    whole = [Span("F", t, 1, "compute", 100 * t, 100 * t + 40) for t in range(3)]
    keys = [Span("K", t, 0, "keys", 100 * t + 50, 100 * t + 90) for t in range(3)]
    pieces = [
        Span("K", t, 0, "keys", 100 * t + a, 100 * t + b) for t in range(3) for a, b in ((50, 60), (60, 75), (75, 90))
    ]
    one, three = (step_times(observed_timelines([whole + k], [0.0])[0]) for k in (keys, pieces))
    for name in one.ms:
        np.testing.assert_allclose(one.ms[name], three.ms[name], atol=1e-12)
    assert steady(one, 1) == {
        "step": [100e-6],
        "dense": [40e-6],
        "exposed_lookup": [40e-6],
        "other": [20e-6],
        "lookup": [40e-6],
    }


def reference(timeline: Timeline, rank: int, step: int) -> dict[str, float]:
    """The definition in the module's docstring, one idle interval at a time, in seconds."""
    start, ready, end = timeline.start[:, rank], timeline.ready[:, rank], timeline.end[:, rank]
    lane = [i for i, name in enumerate(timeline.lanes) if name == "compute"]
    ends = {timeline.refs[i].batch: n for n, i in enumerate(lane)}
    parts = dict.fromkeys(PARTS, 0.0)

    def charge(i: int, seconds: float) -> None:
        category = STAGES[timeline.refs[i].stage].category
        parts[f"exposed_{category}" if category in EXPOSED else category] += seconds

    for n in range(ends[step - 1] + 1, ends[step] + 1):
        i, low = lane[n], end[lane[n - 1]]
        charge(i, end[i] - start[i])
        now = start[i]
        while now > low:
            waited = [j for j in timeline.waited_for[i] if j >= 0]
            if not waited:
                parts["other"] += now - low
                break
            j = max(waited, key=lambda j: end[j])
            parts["other"] += now - max(low, min(end[j], now))
            now = max(low, min(end[j], now))
            collective = min(now, max(low, ready[j]))
            charge(j, now - collective)
            begin = max(low, min(collective, start[j]))
            parts["skew"] += collective - begin
            now, i = begin, j
    return parts


TEMPLATES = [serial(), serial(3), nestpipe(1), nestpipe(4), nestpipe(3, received=1), dbp_only(), fwp_only(4)]
TEMPLATES += [torchrec_schedule()]


@given(
    template=st.sampled_from(TEMPLATES),
    ranks=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    zeros=st.floats(0, 0.6),
    gap=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_parts_are_disjoint_and_sum_to_the_step(template, ranks, seed, zeros, gap):
    ops = template.unroll(7)
    draw = np.random.default_rng(seed)
    durations = draw.exponential(1e-3, (len(ops), ranks)) * (draw.random((len(ops), ranks)) >= zeros)
    timeline = virtual_timeline(ops, durations)
    if gap:
        timeline = scheduled_timeline(ops, spans_of(timeline, 20_000), [0.0] * ranks)
    times = step_times(timeline)
    assert times.steps == tuple(range(1, 7))
    verify(times)
    for row, step in enumerate(times.steps):
        for rank in range(ranks):
            for name, seconds in reference(timeline, rank, step).items():
                assert times.ms[name][row, rank] == pytest.approx(seconds * 1e3, abs=1e-6), (step, rank, name)


def verify(times: StepTimes) -> None:
    """What holds for every account."""
    for name in PARTS:
        assert (times.ms[name] >= -1e-9).all(), name
    np.testing.assert_allclose(sum(times.ms[name] for name in PARTS), times.ms["step"], rtol=1e-9, atol=1e-6)


WRONG = {
    "exposed is the whole of it": lambda ms: {"exposed_communication": ms["communication"]},
    "waiting counts twice": lambda ms: {"exposed_communication": ms["exposed_communication"] + ms["skew"]},
    "nothing is other": lambda ms: {"other": 0 * ms["other"]},
    "the next batch's hidden lookups count": lambda ms: {"exposed_lookup": ms["lookup"]},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_definitions_are_noticed(name):
    template = nestpipe(4)
    ops = template.unroll(8)
    durations = np.random.default_rng(3).exponential(1e-3, (len(ops), 2))
    timeline = scheduled_timeline(ops, spans_of(virtual_timeline(ops, durations), 20_000), [0.0, 0.0])
    times = step_times(timeline)
    verify(times)
    with pytest.raises(AssertionError):
        verify(StepTimes(times.steps, {**times.ms, **WRONG[name](times.ms)}))


def test_steps_without_a_beginning_or_an_end_are_left_out():
    ops = serial().unroll(4)
    timeline = virtual_timeline(ops, np.ones((len(ops), 1)))
    assert step_times(timeline).steps == (1, 2, 3)
    spans = [s for s in spans_of(timeline)[0] if s.batch != 2]  # lost spans are not invented
    assert step_times(scheduled_timeline(ops, [spans], [0.0])).steps == (1,)
    assert step_times(scheduled_timeline(ops, [[]], [0.0])).steps == ()


def test_a_batch_that_was_prepared_but_never_trained_is_not_a_step():
    """Six steps of the engine: S of batch 6 ran as part of step 5, before O of that step."""
    template = nestpipe(2)
    ops = template.unroll(10)
    spans = spans_of(virtual_timeline(ops, np.random.default_rng(2).exponential(1e-3, (len(ops), 1))))
    offset = {(op.ref.stage, op.ref.micro): op.ref.batch for op in template.ops}
    ran = [s for s in spans[0] if s.batch - offset[s.stage, s.micro] < 6]
    assert ("S", 6) in {(s.stage, s.batch) for s in ran}
    times = step_times(scheduled_timeline(ops, [ran], [0.0]))
    assert times.steps == (1, 2, 3, 4, 5)
    verify(times)
    assert (times.ms["step"] > 0).all()


@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(1, 2), zeros=st.floats(0, 0.9))
@settings(max_examples=60, deadline=None)
def test_observed_spans_that_overlap_or_have_no_length_lose_no_time(seed, ranks, zeros):
    """A host thread whose collectives continue in parallel with it. Times are those of a coarse clock."""
    draw = np.random.default_rng(seed)
    spans: list[list[Span]] = []
    for _ in range(ranks):
        now, mine = 0, []
        for t in range(5):
            for stage in "PHKREFBAGUO":
                now += int(draw.integers(0, 3)) * (draw.random() > zeros)
                length = int(draw.integers(0, 20)) * (draw.random() > zeros)
                ref = (stage, t, int(STAGES[stage].per_micro_batch))
                mine.append(Span(*ref, STAGES[stage].lane, now, now + length))
                if stage not in "KEA":  # the host continues while these run
                    now += length
        spans.append(mine)
    for timeline in observed_timelines(spans, [0.0] * ranks):
        times = step_times(timeline)
        np.testing.assert_allclose(sum(times.ms[name] for name in PARTS), times.ms["step"], atol=1e-9)
