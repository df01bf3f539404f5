"""Invariants 1a, 1b and 2 on real runs: overlapped equals one at a time, synchronous equals serial(N), N equals 1."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist

from nestpipe.checker.rules import check
from nestpipe.engine.engine import Engine
from nestpipe.schedule.building import op, schedule
from nestpipe.schedule.frozen_window import fwp_only
from nestpipe.schedule.operations import Schedule
from nestpipe.schedule.templates import dbp_only, nestpipe, serial
from tests.support.engine_runs import (
    SPEC,
    Outcome,
    Setting,
    add_weights,
    differences,
    run_engine,
    train,
    without_synchronisation,
)

RULES = [("sgd", "sgd"), ("rowwise_adagrad", "adam")]


def methods(micro_batches: int) -> list[Schedule]:
    """Every method with N micro-batches, and NestPipe with received rings of 1, 2, 3 and 5."""
    rings = [nestpipe(micro_batches, received, name=f"nestpipe received={received}") for received in (1, 2, 3, 5)]
    one = [dbp_only()] if micro_batches == 1 else []
    return [*rings, *one, fwp_only(micro_batches), serial(micro_batches)]


def compare(micro_batches: int, setting: Setting, jitter_seeds: int, first_seed: int = 0) -> list[str]:
    """Compares every method with serial(N) on this rank. Returns sentences on what differs."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    reference = run_engine(serial(micro_batches), setting, rank, overlap=False)
    wrong = []
    for number, method in enumerate(methods(micro_batches)):
        listed = run_engine(method, setting, rank, overlap=False)
        wrong += [f"{method.name}, one at a time: {name}" for name in differences(listed, reference)]
        for seed in range(jitter_seeds):
            jittered = 100 * number + first_seed + seed + rank
            shaken = run_engine(method, setting, rank, jitter_seed=jittered)
            wrong += [f"{method.name}, delays {jittered}: {name}" for name in differences(shaken, reference)]
    return wrong


def test_the_small_runs_move_weights_and_share_keys() -> None:
    outcome = run_engine(serial(), Setting(), overlap=False)
    start = run_engine(serial(), Setting(steps=0), overlap=False)
    assert (outcome.tensors["table item"] - start.tensors["table item"]).abs().max() > 1e-2
    assert len(outcome.losses) == 20
    batches = Setting().batches(0)
    keys = [set(batch.sparse["seen"].values().tolist()) for batch in batches]
    assert all(len(a & b) >= 3 for a, b in pairwise(keys))


@pytest.mark.parametrize(("micro_batches", "rule"), [(1, 1), (4, 0), (4, 1), (8, 0)])
def test_one_rank(micro_batches: int, rule: int) -> None:
    steps = 20 if micro_batches < 8 else 10
    assert compare(micro_batches, Setting(*RULES[rule], steps=steps), jitter_seeds=1) == []


@pytest.mark.parametrize(("micro_batches", "rule"), [(1, 0), (4, 1)])
def test_two_ranks(pool2, micro_batches: int, rule: int) -> None:
    setting = Setting(*RULES[rule], seed=micro_batches, uneven=True, samples=12, steps=8)
    assert pool2.run(compare, micro_batches, setting, 1) == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("sparse", "dense"), [*product(["sgd", "rowwise_adagrad"], ["sgd", "adam"])])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_whole_grid(request, ranks: int, micro_batches: int, uneven: bool, sparse: str, dense: str) -> None:
    setting = Setting(sparse, dense, seed=ranks, uneven=uneven)
    seeds = {"first_seed": 17 * micro_batches + ranks}
    if ranks == 1:
        assert compare(micro_batches, setting, 2, **seeds) == []
    else:
        pool = request.getfixturevalue(f"pool{ranks}")
        assert pool.run(compare, micro_batches, setting, 1, **seeds, timeout_s=600) == [[]] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_fifty_seeds_of_delays(seed: int) -> None:
    micro_batches = (1, 4, 8)[seed % 3]
    setting = Setting(*RULES[seed % 2], seed=seed, uneven=seed % 4 == 3)
    assert compare(micro_batches, setting, 1, first_seed=1000 + seed) == []


def test_without_synchronisation_the_order_holds_and_rows_are_stale() -> None:
    stale, setting = without_synchronisation(4), Setting()
    listed = run_engine(stale, setting, overlap=False)
    for seed in range(3):
        assert differences(run_engine(stale, setting, jitter_seed=seed), listed) == []
    assert "table item" in differences(listed, run_engine(serial(4), setting, overlap=False))
    problems = check(stale)
    assert problems[0].kind == "stale"
    assert "E1.1 reads a stale row: the update U0 is missing" in problems[0].text


@pytest.mark.parametrize("method", [nestpipe(4), fwp_only(4), dbp_only(), serial(4)], ids=lambda s: s.name)
@pytest.mark.parametrize("uneven", [False, True])
def test_a_second_epoch_and_looks_at_the_table_between_steps(method: Schedule, uneven: bool) -> None:
    setting = Setting(epochs=3, uneven=uneven, steps=7, samples=6)
    reference = run_engine(serial(method.micro_batches), setting, overlap=False, looks=True)
    assert len(reference.losses) == 21
    for jitter_seed in (None, 1):
        shaken = run_engine(method, setting, jitter_seed=jitter_seed, looks=True)
        assert differences(shaken, reference) == []


def test_no_data_at_all_is_an_epoch_of_no_steps() -> None:
    for method in (nestpipe(4), serial(4)):
        assert run_engine(method, Setting(steps=0, epochs=2)).losses == []


def test_two_ranks_one_of_which_has_no_data(pool2) -> None:
    assert pool2.run(compare, 4, Setting(uneven=True, steps=2, epochs=2), 1) == [[], []]


def _losses_by_rank(schedule: Schedule, setting: Setting) -> Outcome:
    return run_engine(schedule, setting, dist.get_rank())


def test_ranks_agree_on_the_number_of_steps_and_end_with_the_same_weights(pool2) -> None:
    one, two = pool2.run(_losses_by_rank, nestpipe(4), Setting(uneven=True, steps=9))
    assert len(one.losses) == len(two.losses) == 9
    assert one.samples != two.samples
    assert two.samples[-2:] == [0, 0]
    assert [n for n in differences(one, two) if n.startswith(("table", "dense"))] == []


@pytest.mark.parametrize(("sparse", "dense"), RULES)
def test_micro_batches_do_not_change_what_is_learned(sparse: str, dense: str) -> None:
    setting = Setting(sparse, "sgd")
    start = run_engine(serial(), Setting(sparse, "sgd", steps=0)).tensors
    whole = run_engine(serial(), setting)
    for method in (nestpipe(4), nestpipe(8), fwp_only(3), serial(16)):
        split = run_engine(method, setting)
        for name in ("table item", "table user", "dense hidden.weight"):
            update = (whole.tensors[name] - start[name]).abs().max()
            error = (whole.tensors[name] - split.tensors[name]).abs().max()
            assert update > 1e-2
            assert error <= 1e-4 * update, f"{method.name}, {name}"
        assert torch.allclose(torch.tensor(whole.losses), torch.tensor(split.losses), rtol=1e-4)


def _late_optimizer_lane() -> Iterator[Schedule]:
    """Schedules that a reader could write: updates have their own lanes, or no lane is called compute."""
    base = nestpipe(3)
    for moved in ({"O": "dense update"}, {"U": "sparse update"}, {"O": "update", "U": "update", "S": "update"}):
        ops = [op(o.ref.relative(), lane=moved.get(o.ref.stage, o.lane)) for o in base.ops]
        yield schedule("+".join(moved), 3, ops)
    yield schedule(
        "renamed", 3, [op(o.ref.relative(), lane="gpu" if o.lane == "compute" else o.lane) for o in base.ops]
    )


@pytest.mark.parametrize("method", list(_late_optimizer_lane()), ids=lambda s: s.name)
def test_updates_may_have_their_own_lanes(method: Schedule) -> None:
    assert check(method) == []
    setting = Setting(steps=8)
    reference = run_engine(serial(3), setting, overlap=False, looks=True)
    for seed in range(3):
        assert differences(run_engine(method, setting, jitter_seed=seed, looks=True), reference) == []


def test_buffers_may_be_reused_before_the_step_ends() -> None:
    # W(t) and R(t+1) inside step t, one buffer: between steps the buffer holds the next batch's rows.
    ops = [op("P+1"), op("H+1"), op("K+1"), *(o for o in serial(2).ops if o.ref.stage in "EFBG")]
    ops += [op("A"), op("U"), op("O"), op("W"), op("R+1")]
    ops = [op(o.ref.relative()) for o in ops]
    method = schedule("one buffer", 2, ops, buffer=1)
    assert check(method) == []
    setting = Setting(steps=8)
    reference = run_engine(serial(2), setting, overlap=False, looks=True)
    assert differences(run_engine(method, setting, jitter_seed=1, looks=True), reference) == []


def test_the_first_error_of_a_lane_reaches_the_caller() -> None:
    setting = Setting(steps=6)
    batches = setting.batches(0)
    bad = batches[3].sparse["who"].values()
    bad[0] = 7
    engine = Engine(nestpipe(2), SPEC, setting.sparse_optimizer, setting.dense_optimizer, 3)
    try:
        with pytest.raises(ValueError, match="feature 'who' holds key 7, but table 'user' has rows 0\\.\\.6"):
            add_weights(train(engine, iter(batches), None), engine)
    finally:
        engine.close()
