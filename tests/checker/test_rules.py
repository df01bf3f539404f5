"""What the checker reports: it names each kind of broken schedule, and the operations that break it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from nestpipe.checker.rules import check, enough_batches
from nestpipe.schedule.building import op, schedule
from nestpipe.schedule.frozen_window import fwp_only
from nestpipe.schedule.operations import Op, Schedule
from nestpipe.schedule.order import linear_extension, ordered_before
from nestpipe.schedule.stages import BATCH_RINGS
from nestpipe.schedule.templates import dbp_only, nestpipe, serial
from tests.support.engine_runs import without_synchronisation


def edited(base: Schedule, edit: Callable[[list[Op]], Sequence[Op]], derive: bool = False, **rings: int) -> Schedule:
    ops = edit([replace(o, after=()) for o in base.ops] if derive else list(base.ops))
    return schedule("broken", base.micro_batches, ops, derive=derive, **{**base.rings, **rings})


def without(name: str) -> Callable[[list[Op]], list[Op]]:
    return lambda ops: [o for o in ops if o.ref.relative() != name]


def changed(name: str, **changes: object) -> Callable[[list[Op]], list[Op]]:
    return lambda ops: [replace(o, **changes) if o.ref.relative() == name else o for o in ops]


def moved(name: str, before: str) -> Callable[[list[Op]], list[Op]]:
    def edit(ops: list[Op]) -> list[Op]:
        rest = without(name)(ops)
        at = next(i for i, o in enumerate(rest) if o.ref.relative() == before)
        return [*rest[:at], *(o for o in ops if o.ref.relative() == name), *rest[at:]]

    return edit


def shifted(name: str, by: int) -> Callable[[list[Op]], list[Op]]:
    return lambda ops: [o.shifted(by) if o.ref.relative() == name else o for o in ops]


def _ahead(ops: list[Op]) -> list[Op]:
    return [o.shifted(1) for o in ops]


N2 = nestpipe(2)
BROKEN = {
    "twice in a step": (
        edited(N2, lambda ops: [*ops, op("O")]),
        ("malformed", "O appears twice in the step; each operation runs once"),
    ),
    "a micro-batch too many": (
        edited(N2, lambda ops: [*ops, op("F.3")]),
        ("malformed", "F.3 names a micro-batch beyond 2"),
    ),
    "waits for nobody": (
        edited(without_synchronisation(2), changed("U", after=(op("S").ref,))),
        ("malformed", "U waits for S, which the schedule never runs"),
    ),
    "a group on two lanes": (
        edited(N2, changed("G.1", lane="gradients")),
        ("malformed", "the collectives of group 'all2all' are spread over lanes all2all, gradients"),
    ),
    "a cycle": (
        edited(N2, changed("F.1", after=(op("A").ref,))),
        ("deadlock", "no rank can continue: "),
    ),
    "an edge to a later step": (
        edited(N2, changed("P+4", after=(op("A").ref,))),
        ("malformed", "P+4 waits for A, which comes after it in schedule order"),
    ),
    "the buffer overwritten while S reads it": (
        edited(N2, changed("R+1", after=(op("K+1").ref, op("W-1").ref))),
        ("race", "S1 and R2 use, one of them writing, buffer slot 0, and nothing orders them"),
    ),
    "received rows overwritten": (
        edited(N2, lambda ops: ops, received=1),
        ("race", "use, one of them writing, received slot 0, and nothing orders them"),
    ),
    "no synchronisation": (
        without_synchronisation(2),
        ("stale", "E1.1 reads a stale row: the update U0 is missing (rows that batches 0 and 1 share)"),
    ),
    "synchronised before the update": (
        edited(N2, moved("S+1", before="U"), derive=True),
        ("stale", "reads a stale row: the update U0 is missing"),
    ),
    "the optimizer before the AllReduce": (
        edited(N2, moved("O", before="A"), derive=True),
        ("incomplete", "O0 uses dense gradients that A0 has not yet summed over workers"),
    ),
    "a gradient forgotten": (
        edited(N2, without("G.2"), derive=True),
        ("incomplete", "U0 consumes the embedding gradients of 0.1, but it must be 0.1, 0.2, each once"),
    ),
    "summed before the last backward": (
        edited(N2, moved("A", before="B.2"), derive=True),
        ("incomplete", "A0 consumes the dense gradients of 0.1, but it must be 0.1, 0.2, each once"),
    ),
    "gradients in another order": (
        edited(serial(3), lambda ops: [*ops[:4], *ops[8:12], *ops[4:8], *ops[12:]], derive=True),
        ("order", "summed in the order 2, 1, 3: equal to float tolerance, not bit for bit"),
    ),
    "no write-back": (
        edited(N2, without("W-1"), derive=True),
        ("incomplete", "at the end the host table lacks the update of batch"),
    ),
    "no optimizer": (
        edited(N2, without("O"), derive=True),
        ("stale", "F1.1 computes with dense weights after 0 of 1 optimizer steps"),
    ),
    "retrieved before written back": (
        edited(serial(2), lambda ops: _ahead(ops[:3]) + ops[4:-1] + _ahead(ops[3:4]) + ops[-1:], derive=True),
        ("stale", "E1.1 reads a stale row: the update U0 is missing"),
    ),
    "read but never filled": (
        edited(N2, without("H+3"), derive=True),
        ("stale", "F0.1 reads batch of batch 0, but the slot holds nothing yet"),
    ),
    "written back two steps late": (
        edited(N2, shifted("W-1", -1), derive=True, buffer=4, plan=6),
        ("malformed", "W-2 writes back later than the step after its batch"),
    ),
    "updated in the next step": (
        edited(N2, lambda ops: [*shifted("O", -1)(ops)[-1:], *ops[:-1]], derive=True),
        ("malformed", "O-1 is scheduled in a different step from its batch; a step must end with its own U and O"),
    ),
    "quantised": (
        edited(N2, changed("E.2", marks=("lossy",))),
        ("lossy", "E.2 (embedding All2All) moves values at reduced precision"),
    ),
    "another rule": (
        edited(N2, changed("U", marks=("update_rule",))),
        ("update_rule", "U (sparse update) changes the update rule"),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_schedule_is_named(name: str) -> None:
    template, (kind, text) = BROKEN[name]
    problems = check(template)
    assert any(problem.kind == kind and text in problem.text for problem in problems), "\n".join(map(str, problems))


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 8, 16])
def test_every_method_is_synchronous(micro_batches: int) -> None:
    rings = [nestpipe(micro_batches, received) for received in (1, 2, 3, 5)]
    for template in (*rings, fwp_only(micro_batches), serial(micro_batches), dbp_only()):
        assert check(template) == [], template.name


def test_a_race_carries_its_operations_and_buffers_come_first() -> None:
    problems = check(edited(N2, lambda ops: [replace(o, after=()) for o in ops]))
    assert {problem.kind for problem in problems} == {"race"}
    assert "buffer slot" in problems[0].text
    for problem in problems:
        assert problem.text.startswith(f"{problem.ops[0]} and {problem.ops[1]} ")


def test_the_cycle_that_is_named_is_one() -> None:
    problem = check(BROKEN["a cycle"][0])[0]
    names = problem.text.removeprefix("no rank can continue: ").split(" waits for ")
    assert names[0] == names[-1]
    assert len(names) > 2


def test_every_ring_turns_over_twice_in_what_is_unrolled() -> None:
    for template in (nestpipe(8), nestpipe(1, 5), edited(N2, lambda ops: ops, batch=9)):
        batches = enough_batches(template)
        assert batches >= max(6, *(template.rings[name] + 3 for name in BATCH_RINGS))
        for name in ("received", "gradient"):
            assert batches * template.micro_batches >= 2 * template.rings[name]


def test_a_race_that_shows_after_many_batches_is_found() -> None:
    # W(t) is free to lag until the ring of 9 buffers has turned over once.
    base = edited(serial(1), lambda ops: [replace(o, lane="rows" if o.ref.stage in "RW" else "compute") for o in ops])
    ops = [replace(o, after=tuple(r for r in o.after if r.stage != "W")) for o in base.ops]
    late = replace(base, ops=tuple(replace(o, lane="late") if o.ref.stage == "W" else o for o in ops))
    late = replace(late, rings={**late.rings, "buffer": 9, "plan": 9})
    races = [problem for problem in check(late) if problem.kind == "race"]
    assert any({ref.stage for ref in race.ops} == {"R", "W"} for race in races)
    assert any("plan slot" in race.text or "buffer slot" in race.text for race in races)


def test_checking_eight_micro_batches_is_fast() -> None:
    fastest = min(_seconds(lambda: check(nestpipe(8))) for _ in range(3))
    assert fastest < 0.2


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_the_legal_order_of_a_sound_schedule_is_its_list() -> None:
    ops = nestpipe(3).unroll(6)
    assert linear_extension(ops) == ops
    before = ordered_before(ops)
    assert not isinstance(before, str)
    assert all(bits < 1 << i for i, bits in before.items())
