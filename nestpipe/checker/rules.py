"""The checker: is this schedule well formed, and is it synchronous training?

The first rule is that every stage declares what it touches: the others look at what is declared. Three rules on the
unrolled graph follow, reported in this order:

* structure: there is no cycle, every operation runs once, and each process group has one lane;
* races: no two conflicting operations are unordered;
* values: executed once on symbolic rows, every read sees exactly the updates that unpipelined training shows it.

Rings are resources with a bounded number of slots, so running ahead without limit is a race on a slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nestpipe.checker.problem import Problem
from nestpipe.checker.staleness import wrong_values
from nestpipe.schedule.operations import Op, Schedule, beyond_limits
from nestpipe.schedule.order import linear_extension, ordered_before
from nestpipe.schedule.stages import BATCH_RINGS, GLOBALS, MICRO_RINGS

#: What a mark on an operation says about training.
MARKS = {
    "lossy": "moves values at reduced precision",
    "update_rule": "changes the update rule, so what is learned differs from plain synchronous training",
}


def check(schedule: Schedule, batches: int | None = None) -> list[Problem]:
    """Everything that keeps ``schedule`` from being synchronous training; an empty list if nothing does.

    ``batches``: how many to unroll. The default is enough for every ring to turn over at least twice.
    """
    problems = [Problem("malformed", text) for text in hidden_accesses(schedule)] + _structure(schedule)
    if problems:
        return problems
    batches = batches or enough_batches(schedule)
    ops = with_empty_batches(schedule, batches)
    done_before = ordered_before(ops)
    if isinstance(done_before, str):
        return [Problem("deadlock", done_before)]
    problems = _forward_edges(schedule) or _races(schedule, ops, done_before, batches)
    if problems:
        return problems
    order = [op for op in linear_extension(ops) if 0 <= op.ref.batch < batches]
    unfinished = [Problem("malformed", text) for text in unfinished_steps(schedule)]
    return [*wrong_values(schedule, order, batches), *_marks(schedule), *unfinished]


def with_empty_batches(schedule: Schedule, batches: int) -> list[Op]:
    """Batches 0..batches-1 unrolled, with empty ones on either side.

    A run skips the operations of batches before the first and after the last. They keep their place in the
    order, so the order that they impose on the other operations holds.
    """
    around = max(schedule.depth, -schedule.offsets[0])
    return [op.shifted(-around) for op in schedule.unroll(batches + 2 * around)]


def enough_batches(schedule: Schedule) -> int:
    """At least six batches, and enough for every ring to turn over twice and for the furthest offsets to meet.

    At most 62, since symbolic rows have a bit per batch: ``beyond_limits`` refuses what would need more.
    """
    turn = max(schedule.rings[name] for name in BATCH_RINGS)
    ahead = schedule.depth - schedule.offsets[0]
    micro_turn = max(-(-schedule.rings[name] // schedule.micro_batches) for name in MICRO_RINGS)
    return max(6, turn + 3, 2 * micro_turn + 2, ahead + 3)


def unfinished_steps(schedule: Schedule) -> list[str]:
    """Sentences on operations that the engine would leave undone: its steps end with the updates of their own batch."""
    texts = []
    for o in schedule.ops:
        name = o.ref.relative()
        if o.ref.stage in "UO" and o.ref.batch != 0:
            texts.append(
                f"{name} is scheduled in a different step from its batch; a step must end with its own U and O"
            )
        if o.ref.stage == "W" and o.ref.batch < -1:
            texts.append(f"{name} writes back later than the step after its batch, when training may have ended")
    return texts


def hidden_accesses(schedule: Schedule) -> list[str]:
    """Sentences on operations whose stage touches in the engine what they do not declare."""
    texts = []
    for o in schedule.ops:
        if o.ref.stage == "D" and schedule.averages_replicas:
            continue  # it touches whatever holds the replicas, and this engine does not run it
        writes = _written(o, schedule)
        touched = {*o.stage.reads, *writes} - {"plan-1"}
        if hidden := sorted(touched - {*o.reads, *o.writes}) or sorted(writes - {*o.writes}):
            texts.append(f"{o.ref.relative()} touches {', '.join(hidden)}, which it does not declare")
    return texts


def _written(op: Op, schedule: Schedule) -> set[str]:
    """What the stage writes in the engine. U writes the table if it updates that itself; G writes what D then sums."""
    written = set(op.stage.writes)
    if op.ref.stage == "U" and schedule.updates_table:
        written = written - {"buffer"} | {"table"}
    if op.ref.stage == "G" and schedule.replicated and not schedule.averages_replicas:
        written = {"arrived"}
    return written


def _structure(schedule: Schedule) -> list[Problem]:
    if text := beyond_limits(schedule):
        return [Problem("malformed", text)]
    texts = []
    names = [o.ref.in_step() for o in schedule.ops]
    for o in schedule.ops:
        if o.ref.micro > schedule.micro_batches:
            texts.append(f"{o.ref.relative()} names a micro-batch beyond {schedule.micro_batches}")
    for name, count in Counter(names).items():
        if count > 1:
            times = "twice" if count == 2 else f"{count} times"
            texts.append(f"{name} appears {times} in the step; each operation runs once")
    for o in schedule.ops:
        for ref in o.after:
            if ref.in_step() not in names:
                texts.append(f"{o.ref.relative()} waits for {ref.relative()}, which the schedule never runs")
    groups: dict[str, set[str]] = {}
    for o in schedule.ops:
        if o.stage.group:
            groups.setdefault(o.stage.group, set()).add(o.lane)
    for group, lanes in groups.items():
        if len(lanes) > 1:
            text = f"the collectives of group '{group}' are spread over lanes {', '.join(sorted(lanes))}"
            texts.append(text + ": ranks could issue them in different orders")
    return [Problem("malformed", text) for text in texts]


def _forward_edges(schedule: Schedule) -> list[Problem]:
    """Edges against schedule order: the list run one op at a time breaks them, and a lane waits for a later step."""
    problems = []
    for n, o in enumerate(schedule.ops):
        for ref in o.after:
            place = schedule.places[ref.in_step()]
            if (ref.batch - place.offset, place.position) >= (0, n):
                text = f"{o.ref.relative()} waits for {ref.relative()}, which comes after it in schedule order"
                problems.append(Problem("malformed", text + ": run one at a time, the list breaks its own edge"))
    return problems


def _races(schedule: Schedule, ops: Sequence[Op], done_before: dict[int, int], batches: int) -> list[Problem]:
    users: dict[tuple[str, int], list[tuple[int, bool]]] = {}
    for i, o in enumerate(ops):
        if not 0 <= o.ref.batch < batches:
            continue
        access = dict.fromkeys((schedule.slot(r, o.ref) for r in o.reads), False)
        access.update(dict.fromkeys((schedule.slot(r, o.ref) for r in o.writes), True))
        for slot, writes in access.items():
            users.setdefault(slot, []).append((i, writes))
    found = []
    for slot, uses in users.items():
        for n, (i, i_writes) in enumerate(uses):
            for j, j_writes in uses[n + 1 :]:
                if (i_writes or j_writes) and not (done_before[j] >> i & 1 or done_before[i] >> j & 1):
                    found.append((slot, i, j, i_writes and j_writes))
    # Buffers first: they hold the symbolic rows, and other races often follow from theirs.
    found.sort(key=lambda f: (f[0][0] != "buffer", f[1], f[2]))
    problems = []
    for (name, index), i, j, both in found:
        share = "both write" if both else "use, one of them writing,"
        where = name if name in GLOBALS else f"{name} slot {index}"
        text = f"{ops[i].ref} and {ops[j].ref} {share} {where}, and nothing orders them"
        problems.append(Problem("race", text, (ops[i].ref, ops[j].ref)))
    return problems


def _marks(schedule: Schedule) -> list[Problem]:
    return [
        Problem(mark, f"{o.ref.relative()} ({o.stage.title}) {MARKS.get(mark, 'is marked ' + mark)}")
        for o in schedule.ops
        for mark in o.marks
    ]
