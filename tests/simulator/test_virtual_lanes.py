"""Virtual-time lanes: what holds for every schedule and every duration."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe import schedule
from nestpipe.engine.thread_lanes import ThreadLanes
from nestpipe.measurement.exposed_time import EXPOSED, step_times
from nestpipe.methods import NESTPIPE, SERIAL, find_method
from nestpipe.schedule.building import op
from nestpipe.simulator.cost import Cluster, stage_seconds
from nestpipe.simulator.profile import load_profile
from nestpipe.simulator.scenario import ALL
from nestpipe.simulator.step_times import Noise, simulate_steps, simulate_timeline
from nestpipe.simulator.virtual_lanes import lane_plan, run_lanes, virtual_timeline

NAMES = sorted(ALL)
PARTS = ("dense", "update", *(f"exposed_{name}" for name in EXPOSED), "skew", "other")


def timeline_of(name: str, micro_batches: int, seed: int, workers: int = 4, group_size: int | None = None):
    plan = lane_plan(find_method(name).schedule(micro_batches).unroll(9))
    rng = np.random.default_rng(seed)
    durations = rng.exponential(1.0, (len(plan.ops), workers)) * (rng.random((len(plan.ops), 1)) > 0.2)
    return plan, durations, run_lanes(plan, durations, group_size)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(0, 10**6), st.sampled_from([None, 1, 2]))
def test_no_lane_runs_two_operations_at_once_and_nothing_starts_early(name, micro_batches, seed, group_size):
    plan, durations, timeline = timeline_of(name, micro_batches, seed, group_size=group_size)
    last = {}
    for i, o in enumerate(plan.ops):
        for j in plan.needs[i]:
            assert (timeline.start[i] >= timeline.end[j]).all()
        if o.lane in last:
            assert (timeline.start[i] >= timeline.end[last[o.lane]]).all()
        last[o.lane] = i
    assert np.allclose(timeline.end - timeline.ready, durations)
    assert (timeline.ready >= timeline.start).all()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(0, 10**6))
def test_parts_of_a_step_are_disjoint_and_sum_to_it(name, micro_batches, seed):
    _, _, timeline = timeline_of(name, micro_batches, seed)
    times = step_times(timeline)
    assert all((times.ms[part] >= -1e-9).all() for part in PARTS)
    assert np.allclose(sum(times.ms[part] for part in PARTS), times.ms["step"])


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(0, 10**6), st.data())
def test_a_longer_operation_never_ends_the_run_sooner(name, micro_batches, seed, data):
    plan, durations, timeline = timeline_of(name, micro_batches, seed)
    slower = durations.copy()
    slower[data.draw(st.integers(0, len(plan.ops) - 1))] += 1.0
    assert (run_lanes(plan, slower).end >= timeline.end - 1e-12).all()


def test_a_collective_starts_when_its_last_member_is_ready():
    ops = [op("F0.1"), op("G0.1", after="F0.1"), op("D0.1", after="G0.1")]
    durations = np.array([[1.0, 5.0, 2.0, 3.0], [1.0] * 4, [1.0] * 4])
    whole = virtual_timeline(ops, durations)
    assert whole.ready[1].tolist() == [5.0] * 4
    grouped = virtual_timeline(ops, durations, 2)
    assert grouped.ready[1].tolist() == [5.0, 5.0, 3.0, 3.0]
    # Replicas: the workers at the same place in each group.
    assert grouped.ready[2].tolist() == [6.0] * 4
    uneven = virtual_timeline(ops, np.array([[1.0, 2.0, 3.0, 4.0], [0.0] * 4, [0.0] * 4]), 1)
    assert uneven.ready[2].tolist() == [4.0] * 4


def test_columns_are_independent_clusters_with_groups_of_one():
    plan = lane_plan(NESTPIPE.schedule(3).unroll(8))
    durations = np.random.default_rng(3).random((len(plan.ops), 5))
    together = run_lanes(plan, durations, independent=True)
    for column in range(5):
        alone = run_lanes(plan, durations[:, column : column + 1], independent=True)
        assert np.array_equal(alone.end[:, 0], together.end[:, column])


def test_workers_that_do_not_split_into_groups_are_refused():
    with pytest.raises(ValueError, match="6 workers cannot be split into groups of 4"):
        virtual_timeline([op("E0.1")], np.ones((1, 6)), 4)


def test_a_cycle_is_named():
    with pytest.raises(ValueError, match="cycle"):
        lane_plan([op("F0.1", after="B0.1"), op("B0.1", after="F0.1")])


def test_virtual_lanes_keep_the_order_of_the_schedule_on_every_lane():
    """Thread lanes run a lane's operations in schedule order; so must virtual ones, for any durations."""
    for name in NAMES:
        _, _, timeline = timeline_of(name, 4, 7)
        for lane in set(timeline.lanes):
            mine = [i for i, here in enumerate(timeline.lanes) if here == lane]
            starts = timeline.start[mine]
            assert (np.diff(starts, axis=0) >= 0).all(), (name, lane)


def test_noise_is_deterministic_by_seed_and_shows_as_skew():
    profile = load_profile("npu-1536-industrial")
    noise = Noise(compute_jitter=0.05, key_skew=0.1, length_imbalance=0.1, stragglers=0.1)
    cluster = Cluster(profile.hardware, 16)
    stages = stage_seconds(cluster, profile.workload, 8)
    one, same, other = (simulate_steps(NESTPIPE, cluster, stages, 8, 5, noise, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(one.ms[name], same.ms[name]) for name in one.ms)
    assert not np.array_equal(one.ms["step"], other.ms["step"])
    assert one.mean("skew").mean() > 0
    quiet = simulate_steps(NESTPIPE, cluster, stages, 8, 5)
    assert one.mean("step").mean() > quiet.mean("step").mean()


def test_noise_of_mean_one_leaves_the_mean_dense_time():
    profile = load_profile("npu-1536-industrial")
    noise = Noise(compute_jitter=0.1)
    cluster = Cluster(profile.hardware, 256)
    stages = stage_seconds(cluster, profile.workload, 8)
    times = simulate_steps(NESTPIPE, cluster, stages, 8, 10, noise)
    quiet = simulate_steps(NESTPIPE, cluster, stages, 8, 10)
    assert times.mean("dense").mean() == pytest.approx(quiet.mean("dense").mean(), rel=0.01)


def test_1536_workers_for_100_steps_take_seconds():
    profile = load_profile("npu-1536-industrial")
    noise = Noise(compute_jitter=0.02, length_imbalance=0.02, key_skew=0.02)
    cluster = Cluster(profile.hardware, 1536)
    stages = stage_seconds(cluster, profile.workload, 8)
    simulate_steps(NESTPIPE, Cluster(profile.hardware, 8), stages, 8, 3)
    began = time.process_time()
    times = simulate_steps(NESTPIPE, cluster, stages, 8, 100, noise)
    assert times.ms["step"].shape == (100, 1536)
    assert time.process_time() - began < 6.0  # 3 s on an idle machine; CPU time, and room for a busy one


def test_a_timeline_shows_every_worker_if_they_differ():
    profile = load_profile("npu-1536-industrial")
    cluster = Cluster(profile.hardware, 12)
    stages = stage_seconds(cluster, profile.workload, 1)
    noisy = simulate_timeline(SERIAL, cluster, stages, noise=Noise(compute_jitter=0.1), steps=2)
    assert noisy.ranks == 12
    assert simulate_timeline(SERIAL, cluster, stages, steps=2).ranks == 1


def test_negative_noise_is_refused():
    with pytest.raises(ValueError, match="key skew is -1"):
        Noise(key_skew=-1)
    with pytest.raises(ValueError, match="must be at most 1"):
        Noise(stragglers=2)


def test_every_micro_batch_of_serial_adds_up():
    plan = lane_plan(schedule.serial(3).unroll(6))
    durations = np.random.default_rng(0).random((len(plan.ops), 1))
    times = step_times(run_lanes(plan, durations))
    per_batch = {b: sum(durations[i, 0] for i, o in enumerate(plan.ops) if o.ref.batch == b) for b in range(6)}
    # W of the batch before belongs to this step: it follows the last compute operation.
    w = {o.ref.batch: durations[i, 0] for i, o in enumerate(plan.ops) if o.ref.stage == "W"}
    for step, ms in zip(times.steps, times.ms["step"][:, 0], strict=True):
        assert ms == pytest.approx((per_batch[step] - w[step] + w[step - 1]) * 1e3)


@pytest.mark.parametrize("name", ["serial", "fwp-only", "nestpipe", "uniemb", "nestpipe+2d-sp"])
def test_virtual_and_thread_lanes_order_a_schedule_alike(name):
    template = find_method(name).schedule(3)
    ops = template.unroll(8)
    plan = lane_plan(ops)
    rng = np.random.default_rng(5)
    seconds = dict(zip(plan.refs, rng.random(len(ops)) * 2e-3, strict=True))
    virtual = run_lanes(plan, np.array([[seconds[ref]] for ref in plan.refs]))
    threads = ThreadLanes(template, lambda ref: time.sleep(seconds.get(ref, 0.0)))
    try:
        threads.start(-template.depth)
        for step in range(-template.depth, 8):
            threads.run_step(step)
        threads.drain()
        spans = {(s.stage, s.batch, s.micro): s for s in threads.take_spans()}
    finally:
        threads.close()
    for lane in template.lanes:
        mine = [i for i, o in enumerate(ops) if o.lane == lane and 1 <= o.ref.batch <= 5]
        by_virtual = sorted(mine, key=lambda i: (virtual.start[i, 0], i))
        by_thread = sorted(mine, key=lambda i: spans[tuple(ops[i].ref)].start)
        assert [ops[i].ref for i in by_virtual] == [ops[i].ref for i in by_thread]
    for i, o in enumerate(ops):
        for j in plan.needs[i]:
            if 1 <= ops[j].ref.batch <= 5 and 1 <= o.ref.batch <= 5:
                assert virtual.end[j, 0] <= virtual.start[i, 0]
                assert spans[tuple(ops[j].ref)].end <= spans[tuple(o.ref)].start
