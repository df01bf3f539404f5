"""Soundness: what the checker accepts has one meaning, whatever the order in which its lanes and edges let it run.

Random schedules (tests/support/random_schedules.py) that it accepts are run in adversarial orders, and each run equals
the marked ``serial(N)`` bit for bit.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from nestpipe.checker.rules import check, with_empty_batches
from nestpipe.schedule.building import counted, marked
from nestpipe.schedule.frozen_window import fwp_only
from nestpipe.schedule.operations import Schedule
from nestpipe.schedule.templates import dbp_only, nestpipe, serial
from nestpipe.trainer import ModelSpec
from tests.support.engine_runs import COUNTING, SPEC, Outcome, Setting, differences
from tests.support.mutations import adversaries, legal_order, run_in_order
from tests.support.random_schedules import random_schedule

SETTING = Setting(steps=7, samples=9)
#: One batch more than the data has, so that running past the end is tested as well.
BATCHES = SETTING.steps + 1


@cache
def meaning(micro_batches: int, lossy: bool, spec: ModelSpec) -> Outcome:
    plain = serial(micro_batches)
    template = marked(plain, "EG", "lossy") if lossy else plain
    return run_in_order(template, SETTING, template.unroll(BATCHES), spec)


def accepted(template: Schedule) -> bool:
    return {problem.kind for problem in check(template)} <= {"lossy"}


def shape(template: Schedule) -> tuple[tuple[str, int], ...]:
    """The order of a schedule's operations, whatever its offsets, rings and lanes."""
    return tuple((o.ref.stage, o.ref.micro) for o in template.ops)


def changed(seed: int, orders: int, spec: ModelSpec = SPEC) -> str:
    """On any number of ranks: what a run of the schedule of ``seed`` changes in one of ``orders``, empty if nothing."""
    template = random_schedule(seed)
    if spec is COUNTING:
        template = counted(template)
    ops = with_empty_batches(template, BATCHES)  # lanes keep the places of operations that they skip
    wanted = meaning(template.micro_batches, any(o.marks for o in template.ops), spec)
    for n, priority in enumerate(adversaries(ops, [], seed=seed, draws=orders - 1)):
        order = legal_order(ops, priority)
        if order is None:
            return f"random {seed}: deadlock"
        try:
            real = [o for o in order if 0 <= o.ref.batch < BATCHES]
            found = differences(run_in_order(template, SETTING, real, spec), wanted)
        except Exception as error:
            return f"random {seed}, order {n}: {type(error).__name__}: {error}"
        if found:
            return f"random {seed}, order {n} differs: {', '.join(found[:3])}"
    return ""


def changed_on_rank(seeds: list[int], orders: int) -> list[str]:
    return [text for seed in seeds if (text := changed(seed, orders))]


def test_accepted_random_schedules_equal_their_meaning_in_adversarial_orders() -> None:
    seeds = [seed for seed in range(40) if accepted(random_schedule(seed))]
    assert len(seeds) >= 12
    assert changed_on_rank(seeds[:12], orders=3) == []


def can_count(seed: int) -> bool:
    try:
        return accepted(counted(random_schedule(seed)))
    except ValueError:  # updates that do not wait for A
        return False


def test_the_same_for_a_model_that_divides_by_a_count() -> None:
    seeds = [seed for seed in range(20) if can_count(seed)]
    assert len(seeds) >= 5
    assert [text for seed in seeds[:5] if (text := changed(seed, 2, COUNTING))] == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_thousand_accepted_random_schedules(pool2) -> None:
    builtin = {shape(t) for n in range(1, 9) for t in (serial(n), nestpipe(n), fwp_only(n), dbp_only())}
    seeds: list[int] = []
    counts: Counter[str] = Counter()
    shapes = set()
    seed = 0
    while len(seeds) < 1000:
        template = random_schedule(seed)
        problems = check(template)
        counts["accepted" if accepted(template) else problems[0].kind] += 1
        if accepted(template):
            seeds.append(seed)
            shapes.add(shape(template))
        seed += 1
    print(dict(counts), f"{len(shapes - builtin)} orders that no built-in has")
    assert len(shapes - builtin) >= 300
    assert changed_on_rank(seeds, orders=5) == []
    assert [text for texts in pool2.run(changed_on_rank, seeds[:200], 5) for text in texts] == []
