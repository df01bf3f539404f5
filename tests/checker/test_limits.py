"""What the checker could not see is refused: rings and offsets beyond its unrolling, accesses that are not declared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nestpipe.checker.requirements import require_runnable
from nestpipe.checker.rules import check, enough_batches
from nestpipe.commands.schedule import _grouped
from nestpipe.schedule.building import op, schedule
from nestpipe.schedule.operations import MAX_BATCHES, MAX_BATCHES_OF_MICRO, Op, Schedule
from nestpipe.schedule.stages import BATCH_RINGS, MICRO_RINGS
from nestpipe.schedule.templates import nestpipe, serial
from tests.support.engine_runs import Setting, run_engine


def far(offset: int, **rings: int) -> Schedule:
    """Serial training, but P reads ``offset`` batches ahead."""
    return schedule("far", 1, [op(f"P+{offset}"), *(replace(o, after=()) for o in serial().ops[1:])], **rings)


@pytest.mark.parametrize("offset", [3, 5, 13, MAX_BATCHES])
def test_every_ring_turns_over_up_to_the_limit(offset: int) -> None:
    """P of a later batch takes the slot of the present one: wrong at every size."""
    assert "stale" in {p.kind for p in check(far(offset, input=offset))}
    if offset < MAX_BATCHES:
        assert check(far(offset, input=offset + 1)) == []


@pytest.mark.parametrize("ring", [*BATCH_RINGS, *MICRO_RINGS])
def test_larger_rings_and_offsets_are_refused(ring: str) -> None:
    for micro_batches in (1, 3):
        most = MAX_BATCHES_OF_MICRO * micro_batches if ring in MICRO_RINGS else MAX_BATCHES
        plain = serial(micro_batches)
        largest = replace(plain, rings={**plain.rings, ring: most})
        assert enough_batches(largest) < 63 and check(largest) == []
        with pytest.raises(
            ValueError, match=f"ring {ring}={most + 1} is larger than anything needs: use at most {most}"
        ):
            schedule("large", micro_batches, plain.ops, **{ring: most + 1})
        [problem] = check(replace(plain, rings={**plain.rings, ring: most + 1}))  # built in another way
        assert problem.kind == "malformed" and f"use at most {most}" in problem.text
    with pytest.raises(ValueError, match="may span at most 48 batches"):
        far(MAX_BATCHES + 1)


@pytest.mark.parametrize("index", range(len(nestpipe(2).ops)))
def test_every_access_that_a_stage_hides_is_the_first_problem_and_the_engine_refuses_it(index: int) -> None:
    whole = nestpipe(2)
    o = whole.ops[index]
    for name in dict.fromkeys((*o.reads, *o.writes)):
        if name == "plan-1":  # only read if S needs it
            continue
        less = [tuple(r for r in names if r != name) for names in (o.reads, o.writes)]
        hiding: Op = replace(o, reads=less[0], writes=less[1])
        hidden = replace(whole, ops=tuple(hiding if x is o else x for x in whole.ops))
        text = check(hidden)[0].text
        assert text.startswith(o.ref.relative()) and text.endswith("which it does not declare")
        with pytest.raises(ValueError, match="which it does not declare"):
            require_runnable(hidden)


def test_the_same_fault_in_many_steps_is_one_line() -> None:
    problems = check(far(5, input=5))
    lines = _grouped(problems)
    assert 2 * len(lines) < len(problems) and len(set(lines)) == len(lines)
    assert sum(line.startswith("stale: H") for line in lines) == 1
    assert lines[0].startswith(str(problems[0])) and lines[0].endswith(" steps)")


def test_an_update_of_the_table_leaves_the_buffer_of_a_later_batch_as_it_is() -> None:
    """Stale by two: its meaning does not depend on how many buffers there are, so U may not write one."""
    names = ["P+4", "H+3", "K+3", "E.1", "R+2", "F.1", "B.1", "G.1", "A"]
    ops = [*map(op, names), op("U", writes="accumulator table"), op("O")]
    runs = [
        run_engine(schedule("stale", 1, ops, buffer=n, plan=6), Setting(steps=8), overlap=False).losses for n in (2, 3)
    ]
    assert runs[0] == runs[1]
