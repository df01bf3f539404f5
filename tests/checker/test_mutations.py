"""Invariant 3: what the checker says about a changed schedule agrees with what runs of it show.

A mutant's operations are executed in many legal orders. If any of them changes a bit, raises or
cannot end, the checker must have rejected the mutant. A mutant that the checker accepts never differs.
A rejected mutant need not differ in any order that is tried, since not all orders are tried.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from nestpipe.checker.problem import Problem
from nestpipe.checker.rules import check
from nestpipe.schedule.building import op, schedule
from nestpipe.schedule.frozen_window import fwp_only
from nestpipe.schedule.operations import Schedule
from nestpipe.schedule.templates import dbp_only, nestpipe, serial
from tests.support.engine_runs import Outcome, Setting, differences, run_engine
from tests.support.mutations import Mutant, adversaries, legal_order, mutants, run_in_order, twice

SETTING = Setting(steps=8, samples=6)
#: One batch more than the data has, so that running past the end is tested as well.
BATCHES = SETTING.steps + 1
BASES = (nestpipe(2), nestpipe(3), nestpipe(4), nestpipe(3, 1), fwp_only(2), fwp_only(3), dbp_only(), serial(3))
KINDS = {"malformed", "deadlock", "race", "stale", "incomplete", "order"}


@cache
def reference(micro_batches: int) -> Outcome:
    torch.set_num_threads(1)
    return run_in_order(serial(micro_batches), SETTING, serial(micro_batches).unroll(BATCHES))


def change(template: Schedule, problems: list[Problem], draws: int) -> str | None:
    """What an adversarial run shows to be wrong, or None if all the runs equal serial(N) bit for bit."""
    ops = template.unroll(BATCHES)
    for priority in (None, *adversaries(ops, problems, seed=len(ops), draws=draws)):
        # First the list itself, one op at a time, whatever its edges say (invariant 1a).
        order = legal_order(ops, priority) if priority else ops
        if order is None:
            return "deadlock"
        try:
            outcome = run_in_order(template, SETTING, order)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if found := differences(outcome, reference(template.micro_batches)):
            return f"differs: {', '.join(found[:3])}"
    return None


def distinct(found: Iterable[Mutant]) -> list[Mutant]:
    bases = {Mutant("", "", base).key for base in BASES}
    return list({m.key: m for m in found if m.key not in bases}.values())


def all_mutants(pairs: int) -> Iterator[Mutant]:
    for number, base in enumerate(BASES):
        for m in (*mutants(base), *twice(base, pairs, number)):
            yield replace(m, what=f"{base.name}({base.micro_batches}): {m.what}")


def judge(found: Iterable[Mutant], draws: int) -> Counter[tuple[str, str]]:
    """Counts by (verdict, kind of mutation). Fails on the first mutant that is accepted but changes something."""
    counts: Counter[tuple[str, str]] = Counter()
    for m in found:
        problems = check(m.schedule)
        assert all(problem.kind in KINDS and len(problem.text.split()) > 4 for problem in problems)
        shown = change(m.schedule, problems, draws)
        assert problems or not shown, f"accepted, but {shown}: {m.kind}, {m.what}"
        verdict = "accepted, equal" if not problems else "rejected, changed" if shown else "rejected, harmless"
        counts[verdict, m.kind] += 1
    return counts


def report(counts: Counter[tuple[str, str]]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for (verdict, kind), count in sorted(counts.items()):
        print(f"{verdict:20} {kind:35} {count}")
        totals[verdict] += count
    print(dict(totals), sum(totals.values()))
    return totals


def test_a_sample_of_all_mutations() -> None:
    by_kind: dict[str, list[Mutant]] = {}
    for m in all_mutants(pairs=2):
        by_kind.setdefault(m.kind, []).append(m)
    draw = random.Random(4)
    sample = distinct(m for kind in by_kind.values() for m in draw.sample(kind, min(len(kind), 6)))
    totals = report(judge(sample, draws=4))
    assert totals["rejected, changed"] >= 60
    assert totals["accepted, equal"] >= 20
    assert sum(totals.values()) >= 100


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(len(BASES)), ids=lambda n: f"{BASES[n].name}-{BASES[n].micro_batches}-{n}")
def test_many_mutations(number: int) -> None:
    base = BASES[number]
    single = list(mutants(base))
    few = [m for m in single if "edge" in m.kind or "ring" in m.kind or "lane" in m.kind]
    more = random.Random(number).sample(single, min(len(single), 250))
    totals = report(judge(distinct([*few, *more, *twice(base, 50, number)]), draws=12))
    assert totals["rejected, changed"] > totals["rejected, harmless"]
    assert totals["accepted, equal"] > 0


def test_every_edge_of_nestpipe_is_needed_and_its_loss_shows() -> None:
    deleted = [m for m in mutants(nestpipe(3)) if m.kind == "delete edge"]
    assert len(deleted) >= 18
    assert all(check(m.schedule)[0].kind in ("race", "deadlock") for m in deleted)
    shown = [m.what for m in deleted if change(m.schedule, check(m.schedule), draws=0)]
    assert len(shown) >= len(deleted) - 4, sorted({m.what for m in deleted} - set(shown))


def test_what_the_checker_accepts_equals_serial_on_real_lanes_too() -> None:
    found = random.Random(2).sample(list(mutants(nestpipe(3))), 120)
    accepted = [m for m in distinct(found) if not check(m.schedule)]
    wanted = run_engine(serial(3), SETTING, overlap=False)
    for seed, m in enumerate(random.Random(1).sample(accepted, 8)):
        assert differences(run_engine(m.schedule, SETTING, jitter_seed=seed), wanted) == [], m.what


def test_adversarial_orders_show_that_edges_are_missing() -> None:
    # This tests the instrument: legal orders of a sound schedule agree, but those of a broken one do not.
    sound = nestpipe(2)
    assert change(sound, [], draws=25) is None
    broken = schedule("no edges", 2, [op(o.ref.relative()) for o in sound.ops], derive=False)
    assert change(broken, check(broken), draws=3)


def test_sums_in_another_order_differ_in_bits_and_are_named() -> None:
    ops = serial(3).ops
    swapped = [*ops[:4], *ops[12:16], *ops[4:12], *ops[16:]]  # micro-batches 3, 1, 2
    other = schedule("3, 1, 2", 3, [op(o.ref.relative()) for o in swapped])
    assert {problem.kind for problem in check(other)} == {"order"}
    assert change(other, [], draws=0)


def test_what_the_engine_refuses_the_checker_rejects() -> None:
    refused = []
    for m in mutants(nestpipe(2)):
        if not m.kind.startswith(("delete operation", "change offset")):
            continue
        try:
            run_in_order(m.schedule, SETTING, [])
        except ValueError as error:
            refused.append(m)
            assert "lacks" in str(error) or "in a different step" in str(error) or "writes back later" in str(error)
            assert check(m.schedule), f"{m.kind}, {m.what}: {error}"
    assert len(refused) >= 20
