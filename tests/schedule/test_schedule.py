"""Schedule templates: unrolling, slots, and the edges that follow from reads and writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.checker.rules import check
from nestpipe.schedule.building import op, parse_ref, schedule
from nestpipe.schedule.frozen_window import fwp_only
from nestpipe.schedule.operations import Op, Ref, Schedule
from nestpipe.schedule.order import ordered_before, with_derived_edges
from nestpipe.schedule.stages import BATCH_RINGS, STAGES
from nestpipe.schedule.templates import dbp_only, nestpipe, serial

LANES = ("compute", "rows", "keys", "all2all", "extra")


@st.composite
def templates(draw: st.DrawFn, furthest: int = 2) -> Schedule:
    """All operations in any order, at any offset from 0 to ``furthest``, on any lanes, with any rings; no edges."""
    micro_batches = draw(st.integers(1, 3))
    names = [s for s in STAGES if not STAGES[s].per_micro_batch]
    names += [f"{s}.{m}" for s in STAGES if STAGES[s].per_micro_batch for m in range(1, micro_batches + 1)]
    ops = []
    for name in draw(st.permutations(names)):
        stage, _, micro = name.partition(".")
        offset = draw(st.integers(0, furthest))
        ops.append(op(f"{stage}+{offset}" + (f".{micro}" if micro else ""), lane=draw(st.sampled_from(LANES))))
    rings = {ring: draw(st.integers(1, 4)) for ring in ("batch", "plan", "buffer", "received", "gradient")}
    return schedule("any", micro_batches, ops, derive=False, **rings)


def races(template: Schedule, batches: int = 8) -> list[tuple[Ref, Ref]]:
    """Unordered pairs that touch the same slot, at least one of them writing; straight from the definition."""
    ops = template.unroll(batches)
    before = ordered_before(ops)
    assert not isinstance(before, str), before

    def slots(o: Op, names: tuple[str, ...]) -> set:
        return {template.slot(name, o.ref) for name in names}

    found = []
    for j, b in enumerate(ops):
        for i, a in enumerate(ops[:j]):
            a_writes, b_writes = slots(a, a.writes), slots(b, b.writes)
            clash = a_writes & (b_writes | slots(b, b.reads)) or b_writes & slots(a, a.reads)
            if clash and not (before[j] >> i & 1 or before[i] >> j & 1):
                found.append((a.ref, b.ref))
    return found


@settings(max_examples=15, deadline=None)
@given(templates())
def test_derived_edges_leave_no_race_and_point_backwards(template: Schedule) -> None:
    derived = with_derived_edges(template)
    assert races(derived) == []
    assert [o.ref for o in derived.ops] == [o.ref for o in template.ops]
    assert not any(problem.kind in ("race", "deadlock") for problem in check(derived))
    assert not any("schedule order" in problem.text for problem in check(derived))


@settings(max_examples=6, deadline=None)
@given(templates(furthest=0))
def test_each_derived_edge_is_needed(template: Schedule) -> None:
    derived = with_derived_edges(template)
    for i, o in enumerate(derived.ops):
        for edge in o.after:
            less = replace(o, after=tuple(e for e in o.after if e != edge))
            assert races(replace(derived, ops=(*derived.ops[:i], less, *derived.ops[i + 1 :]))), f"{o.ref} after {edge}"


@pytest.mark.parametrize("template", [nestpipe(2), nestpipe(4, 2), dbp_only(), fwp_only(3)], ids=lambda s: s.name)
def test_dropping_any_edge_of_a_method_is_a_race(template: Schedule) -> None:
    for i, o in enumerate(template.ops):
        for edge in o.after:
            less = replace(o, after=tuple(e for e in o.after if e != edge))
            problems = check(replace(template, ops=(*template.ops[:i], less, *template.ops[i + 1 :])))
            # By definition fwp-only reads a batch only after the previous step. Correctness does not need that edge.
            assert problems or o.ref.stage == "P", f"{o.ref.relative()} after {edge.relative()}"


@pytest.mark.parametrize("template", [nestpipe(3), serial(2), fwp_only(2)], ids=lambda s: s.name)
def test_unroll_names_every_operation_once_in_schedule_order(template: Schedule) -> None:
    ops = template.unroll(5)
    refs = [o.ref for o in ops]
    assert len(set(refs)) == len(refs) == 5 * len(template.ops)
    assert {ref.batch for ref in refs} == set(range(5))
    assert all(0 <= edge.batch < 5 for o in ops for edge in o.after)
    by_step = sorted(
        (ref.batch - o.ref.batch, place, ref)
        for place, o in enumerate(template.ops)
        for ref in refs
        if (ref.stage, ref.micro) == (o.ref.stage, o.ref.micro)
    )
    assert [ref for _, _, ref in by_step] == refs


def test_unrolled_edges_keep_their_distance() -> None:
    template = nestpipe(2)
    edges = {o.ref: o.after for o in template.ops}
    for o in template.unroll(9):
        if 4 <= o.ref.batch < 8:
            relative = next(t for t in edges if (t.stage, t.micro) == (o.ref.stage, o.ref.micro))
            by = o.ref.batch - relative.batch
            assert o.after == tuple(e._replace(batch=e.batch + by) for e in edges[relative])


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_slots_turn_with_the_batch_or_with_the_micro_batch(micro_batches: int) -> None:
    template = nestpipe(micro_batches, received=3)
    for batch in range(12):
        for name, size in BATCH_RINGS.items():
            assert template.slot(name, Ref("R", batch)) == (name, batch % size)
            assert template.slot(f"{name}-1", Ref("R", batch)) == (name, (batch - 1) % size)
        for micro in range(1, micro_batches + 1):
            ref = Ref("E", batch, micro)
            assert template.slot("received", ref) == ("received", (batch * micro_batches + micro - 1) % 3)
            assert template.slot("dense", ref) == ("dense", 0)


def test_consecutive_micro_batches_use_consecutive_slots() -> None:
    template = nestpipe(4, received=3)
    slots = [template.slot("received", Ref("E", b, m))[1] for b in range(6) for m in range(1, 5)]
    assert slots == [n % 3 for n in range(24)]


def test_depth_is_how_far_the_furthest_stage_runs_ahead() -> None:
    assert serial(4).depth == fwp_only(4).depth == 0
    assert nestpipe(4).depth == max(o.ref.batch for o in nestpipe(4).ops) >= 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("X+1", "unknown stage 'X'"),
        ("R+one", "is not an operation: expected a stage letter"),
        ("E+1", "stage E (embedding All2All) needs a micro-batch, as in E.1"),
        ("R.2", "stage R (embedding retrieval) has no micro-batch"),
        ("", "unknown stage ''"),
    ],
)
def test_a_wrong_operation_name_is_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_ref(text)
    assert message in str(caught.value)


@given(st.sampled_from(list(STAGES)), st.integers(-9, 99), st.integers(1, 99))
def test_names_read_back(stage: str, batch: int, micro: int) -> None:
    ref = Ref(stage, batch, micro if STAGES[stage].per_micro_batch else 0)
    assert parse_ref(ref.relative()) == parse_ref(str(ref)) == ref
