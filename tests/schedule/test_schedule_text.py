"""The text form: what is printed parses to the same schedule, and errors name the file and the line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.schedule.building import op, schedule
from nestpipe.schedule.frozen_window import fwp_only
from nestpipe.schedule.operations import Op, Ref, Schedule
from nestpipe.schedule.stages import BATCH_RINGS, GLOBALS, MICRO_RINGS, STAGES
from nestpipe.schedule.templates import dbp_only, nestpipe, serial
from nestpipe.schedule.text import ScheduleError, load, parse, to_text

WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda word: word not in ("after", "reads", "writes", "marks", "schedule", "ring")
)
RESOURCES = st.sampled_from([*BATCH_RINGS, *MICRO_RINGS, *GLOBALS, "plan-1", "buffer-1"])
ACCESS = st.lists(RESOURCES, unique=True, max_size=3).map(tuple)


@st.composite
def refs(draw: st.DrawFn) -> Ref:
    stage = draw(st.sampled_from(list(STAGES)))
    micro = draw(st.integers(1, 12)) if STAGES[stage].per_micro_batch else 0
    return Ref(stage, draw(st.integers(-3, 12)), micro)


@st.composite
def ops(draw: st.DrawFn) -> Op:
    ref = draw(refs())
    default = draw(st.booleans())
    return Op(
        ref,
        draw(WORDS),
        tuple(draw(st.lists(refs(), unique=True, max_size=3))),
        STAGES[ref.stage].reads if default else draw(ACCESS),
        STAGES[ref.stage].writes if default else draw(ACCESS),
        tuple(draw(st.lists(WORDS, max_size=2))),
    )


@settings(deadline=None)
@given(WORDS, st.integers(1, 12), st.lists(ops(), min_size=1, max_size=8), st.integers(1, 9))
def test_every_schedule_reads_back(name: str, micro_batches: int, found: list[Op], ring: int) -> None:
    written = schedule(name, micro_batches, found, derive=False, buffer=ring)
    assert parse(to_text(written)) == written


@pytest.mark.parametrize("template", [nestpipe(4), dbp_only(), fwp_only(2), serial(), serial(3)], ids=lambda s: s.name)
def test_every_method_reads_back(template: Schedule, tmp_path: Path) -> None:
    assert parse(to_text(template)) == template
    (tmp_path / "a.txt").write_text("# a comment\n\n" + to_text(template).replace("\n", "  # why\n"))
    assert load(tmp_path / "a.txt") == template


def test_edges_are_derived_if_the_text_asks_for_it() -> None:
    full = nestpipe(2)
    lines = [f"schedule nestpipe micro_batches=2\nring received={full.rings['received']}"]
    lines += [f"{o.ref.relative()} {o.lane}" for o in full.ops]
    plain, derived = parse("\n".join(lines)), parse("\n".join([*lines, "derive edges"]))
    assert derived == full
    assert not any(o.after for o in plain.ops)


def test_empty_reads_differ_from_reads_that_are_left_out() -> None:
    line = parse("schedule s micro_batches=1\nR rows reads - writes buffer marks lossy\n").ops[0]
    assert (line.reads, line.writes, line.marks) == ((), ("buffer",), ("lossy",))
    assert parse("schedule s micro_batches=1\nR rows\n").ops[0] == op("R")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("R+1", "'R+1': expected its lane next, as in 'R+1 rows'"),
        ("R+1 after K", "'R+1': expected its lane next"),
        ("Z+1 rows", "'Z+1': unknown stage 'Z', one of P H K"),
        ("E compute", "needs a micro-batch, as in E.1"),
        ("R rows later K", "'later': expected one of after reads writes marks"),
        ("R rows after K.1", "stage K (key routing) has no micro-batch"),
        ("R rows reads cache", "unknown resource 'cache', expected one of input batch"),
        ("ring pool=2", "unknown setting 'pool'"),
        ("ring buffer=0", "'buffer=0': expected a whole number from 1 to 1024, as in buffer=2"),
        ("ring buffer=1025", "'buffer=1025': expected a whole number from 1 to 1024"),
        ("R+65 rows", "'R+65': expected an offset of at most 48 batches"),
        ("R rows after K-99999999", "'K-99999999': expected an offset of at most 48 batches"),
        ("ring buffer", "'buffer': expected a whole number"),
        ("ring", "the line ends too early"),
        ("ring buffer=2 buffer=3", "ring 'buffer' is given twice, first as 2: keep one"),
        ("R rows after", "'after': nothing follows it"),
        ("R rows after K after P", "'after' is in the line twice"),
        ("R rows reads table-1", "'table-1': only these have a slot of the batch before: input batch"),
        ("F.1 compuet", "lane 'compuet': is it 'compute'?"),
        ("F.1 Compute", "lane 'Compute': is it 'compute'?"),
        ("E.1 all2al", "lane 'all2al': is it 'all2all'?"),
        ("schedule other micro_batches=2", "expected one line 'schedule NAME micro_batches=N'"),
        ("schedule other", "the line ends too early"),
        ("schedule other batches=2", "unknown setting 'batches', expected one of micro_batches"),
    ],
)
def test_a_wrong_line_is_named_and_explained(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.schedule"
    path.write_text(f"schedule mine micro_batches=2\n\n# a comment\n{line}\n")
    with pytest.raises(ScheduleError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:4: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "# nothing\n", "schedule s micro_batches=1\n", "R rows\n"])
def test_a_text_without_name_or_operations_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"^mine: expected 'schedule NAME micro_batches=N' and"):
        parse(text, "mine")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, why in (("missing", "there is no such file"), ("binary", "cannot be read as a schedule")):
        with pytest.raises(ScheduleError, match=f"{name}: {why}"):
            load(tmp_path / name)
