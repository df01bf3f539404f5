"""Lanes that are threads: order, waits, errors and closing."""

from __future__ import annotations

import random
import threading
import time
import tracemalloc
from collections import defaultdict

import pytest

from nestpipe.engine.lanes import LaneStopped, OneAtATime
from nestpipe.engine.thread_lanes import ThreadLanes
from nestpipe.schedule.building import op, schedule
from nestpipe.schedule.frozen_window import fwp_only
from nestpipe.schedule.operations import Ref, Schedule
from nestpipe.schedule.order import predecessors
from nestpipe.schedule.templates import dbp_only, nestpipe, serial


def run(template: Schedule, steps: int, execute, **options) -> ThreadLanes:
    lanes = ThreadLanes(template, execute, **options)
    lanes.start(-template.depth)
    for step in range(-template.depth, steps):
        lanes.run_step(step)
    lanes.drain()
    return lanes


@pytest.mark.parametrize("template", [nestpipe(3), dbp_only(), fwp_only(2), serial(2)], ids=lambda s: s.name)
@pytest.mark.parametrize("shaken", [False, True])
def test_lanes_keep_their_order_and_every_edge(template: Schedule, shaken: bool) -> None:
    draw = random.Random(3)
    begun, ended, running = {}, {}, defaultdict(int)
    clock = iter(range(10**9))
    lock = threading.Lock()
    lane_of = {(o.ref.stage, o.ref.micro): o.lane for o in template.ops}

    def execute(ref: Ref) -> None:
        lane = lane_of[ref.stage, ref.micro]
        with lock:
            begun[ref] = next(clock)
            running[lane] += 1
            assert running[lane] == 1
        time.sleep(draw.random() * 2e-4)
        with lock:
            running[lane] -= 1
            ended[ref] = next(clock)

    delay = (lambda ref: draw.random() * 5e-4) if shaken else None
    lanes = run(template, 8, execute, delay=delay)
    lanes.close()
    ops = template.unroll(6)
    for o, needs in zip(ops, predecessors(ops), strict=True):
        for j in needs:
            assert ended[ops[j].ref] < begun[o.ref], f"{o.ref} ran before {ops[j].ref} was done"
    assert {o.ref for o in ops} <= begun.keys()


def test_spans_name_every_operation_once_and_are_taken_once() -> None:
    template = nestpipe(2)
    lanes = run(template, 5, lambda ref: None)
    spans = lanes.take_spans()
    assert lanes.take_spans() == []
    lanes.close()
    names = [(s.stage, s.batch, s.micro) for s in spans]
    assert len(set(names)) == len(names) == len(template.ops) * (5 + template.depth)
    lane_of = {(o.ref.stage, o.ref.micro): o.lane for o in template.ops}
    for s in spans:
        assert s.lane == lane_of[s.stage, s.micro]
        assert s.start <= s.end
    for lane in template.lanes:
        mine = sorted((s for s in spans if s.lane == lane), key=lambda s: s.start)
        assert all(a.end <= b.start for a, b in zip(mine, mine[1:], strict=False))  # noqa: RUF007


def test_two_lanes_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=10)  # breaks unless both operations are running at once
    template = schedule("two", 1, [op("P", lane="input"), op("A", lane="compute")], derive=False)
    run(template, 5, lambda ref: meeting.wait()).close()


@pytest.mark.parametrize("stage", ["P", "R", "G", "F", "W"])
def test_an_error_in_any_lane_reaches_the_caller_and_stops_all(stage: str) -> None:
    template, ran = nestpipe(2), []
    before = threading.active_count()

    def execute(ref: Ref) -> None:
        ran.append(ref)
        if ref.stage == stage and ref.batch == 2:
            raise KeyError(str(ref))

    lanes = ThreadLanes(template, execute)
    lanes.start(-template.depth)
    with pytest.raises((KeyError, LaneStopped)) as caught:
        for step in range(-template.depth, 20):
            lanes.run_step(step)
    first = caught.value if isinstance(caught.value, KeyError) else caught.value.__cause__
    assert isinstance(first, KeyError)
    assert first.args[0].startswith(f"{stage}2")
    for call in (lanes.drain, lambda: lanes.run_step(20), lambda: lanes.wait(Ref("O", 15))):
        with pytest.raises(LaneStopped) as again:
            call()
        assert again.value.__cause__ is first
    lanes.close()
    assert threading.active_count() == before
    count = len(ran)
    time.sleep(0.02)
    assert len(ran) == count
    assert max(ref.batch for ref in ran) <= 2 + template.depth + 4


def test_a_lane_that_waits_for_nobody_stops_too() -> None:
    template = schedule("two", 1, [op("P", lane="input"), op("A", lane="compute")], derive=False)
    failed, ran = threading.Event(), []

    def execute(ref: Ref) -> None:
        if ref.stage == "A":
            failed.set()
            raise RuntimeError("first")
        failed.wait(10)
        time.sleep(0.01)
        ran.append(ref)

    lanes = ThreadLanes(template, execute)
    lanes.start(0)
    for _ in range(3):
        with pytest.raises((RuntimeError, LaneStopped)):
            lanes.run_step(0)
    lanes.close()
    assert len(ran) <= 1


def test_the_first_of_two_errors_is_reported() -> None:
    template = schedule("two", 1, [op("P", lane="input"), op("A", lane="compute"), op("O", "P A")], derive=False)
    late = threading.Event()

    def execute(ref: Ref) -> None:
        if ref.stage == "P":
            raise ValueError("first")
        time.sleep(0.1)
        late.set()
        raise ValueError("second")

    lanes = ThreadLanes(template, execute)
    lanes.start(0)
    with pytest.raises(ValueError, match="second"):  # raised by the caller's own operation
        lanes.run_step(0)
    with pytest.raises(LaneStopped) as caught:
        lanes.drain()
    assert str(caught.value.__cause__) == "first"
    assert late.is_set()
    lanes.close()


def test_wait_returns_when_the_operation_has_run() -> None:
    template = schedule("three", 1, [op("A", lane="slow"), op("P", lane="compute")], derive=False)
    done = []

    def execute(ref: Ref) -> None:
        if ref.stage == "A":
            time.sleep(0.02)
        done.append(ref)

    lanes = ThreadLanes(template, execute)
    for first in (0, 7):  # counts start again
        lanes.start(first)
        for step in range(first, first + 3):
            lanes.run_step(step)
        lanes.wait(Ref("A", first + 1))
        assert Ref("A", first + 1) in done
        lanes.drain()
        assert Ref("A", first + 2) in done
    lanes.close()


def test_closing_ends_every_thread() -> None:
    before = threading.active_count()
    template = nestpipe(2)
    lanes = run(template, 3, lambda ref: None)
    assert threading.active_count() == before + len(template.lanes) - 1
    lanes.close()
    assert threading.active_count() == before


def test_without_a_lane_called_compute_every_lane_is_a_thread() -> None:
    template = schedule("one", 1, [op("P", lane="elsewhere")], derive=False)
    threads = set()
    lanes = run(template, 4, lambda ref: threads.add(threading.current_thread()))
    lanes.close()
    assert len(threads) == 1 and threading.current_thread() not in threads


def test_thousands_of_steps_leave_nothing_behind() -> None:
    template = schedule("three", 1, [op("P"), op("K", after="P"), op("A", after="K", lane="compute")], derive=False)
    lanes = run(template, 50, lambda ref: None)
    lanes.take_spans()
    tracemalloc.start()
    try:
        for step in range(50, 2050):
            lanes.run_step(step)
            lanes.take_spans()
        lanes.drain()
        lanes.take_spans()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        lanes.close()
    assert left < 20_000


def test_one_at_a_time_runs_the_list_in_order() -> None:
    template, seen = nestpipe(2), []
    lanes = OneAtATime(template, seen.append)
    for step in range(-template.depth, 8):
        lanes.run_step(step)
    wanted = [o.ref for o in template.unroll(5)]
    assert [ref for ref in seen if ref in set(wanted)] == wanted
    spans = lanes.take_spans()
    assert [(s.stage, s.batch, s.micro) for s in spans] == [tuple(ref) for ref in seen]
    assert all(a.end <= b.start for a, b in zip(spans, spans[1:], strict=False))  # noqa: RUF007
    assert lanes.take_spans() == []
