"""The checker: is this schedule well formed, and is it synchronous training?

Three rules on the unrolled graph, reported in this order: structure (no cycle, every operation
once, one lane per process group), races (conflicting operations that nothing orders), and values
(executed once on symbolic rows, every read sees exactly the updates that unpipelined training
would show it). Rings are resources with a bounded number of slots, so running ahead without limit
is a race on a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nestpipe.checker.staleness import value_problems
from nestpipe.schedule.operations import Op, Ref, Schedule
from nestpipe.schedule.order import linear_extension, ordered_before
from nestpipe.schedule.stages import BATCH_RINGS, GLOBALS, MICRO_RINGS


@dataclass(frozen=True)
class Problem:
    """``kind``: malformed, deadlock, race, stale, incomplete, order, lossy or update_rule; ``text``: one sentence.

    ``ops``: the two operations of a race.
    """

    kind: str
    text: str
    ops: tuple[Ref, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def check(template: Schedule, batches: int | None = None) -> list[Problem]:
    """Everything that keeps ``template`` from being synchronous training; an empty list where nothing does.

    ``batches``: how many to unroll; by default so many that every ring turns over at least twice.
    """
    problems = _structure(template)
    if problems:
        return problems
    batches = batches or enough_batches(template)
    ops = with_empty_batches(template, batches)
    before = ordered_before(ops)
    if isinstance(before, str):
        return [Problem("deadlock", before)]
    problems = _forward_edges(template) or _races(template, ops, before, batches)
    if problems:
        return problems
    order = [op for op in linear_extension(ops) if 0 <= op.ref.batch < batches]
    values = [Problem(*p) for p in value_problems(template, order, batches)]
    return [*values, *_marks(template), *(Problem("malformed", text) for text in unfinished_steps(template))]


def is_synchronous(template: Schedule) -> bool:
    return not check(template)


def with_empty_batches(template: Schedule, batches: int) -> list[Op]:
    """Batches 0..batches-1 unrolled, with empty ones on either side.

    A run passes over the operations of batches before the first and after the last, but in their
    place: what they order among the others holds.
    """
    around = max(template.depth, -template.offsets[0])
    return [op.shifted(-around) for op in template.unroll(batches + 2 * around)]


def enough_batches(template: Schedule) -> int:
    """At least six, and so many that every ring turns over twice in sight."""
    turn = max(template.rings[name] for name in BATCH_RINGS)
    micro_turn = max(-(-template.rings[name] // template.micro_batches) for name in MICRO_RINGS)
    return min(60, max(6, turn + 3, 2 * micro_turn + 2))  # symbolic rows have a bit per batch


def unfinished_steps(template: Schedule) -> list[str]:
    """Sentences on operations that a step of the engine leaves undone: it ends with the updates of its own batch."""
    texts = []
    for o in template.ops:
        if o.ref.stage in "UO" and o.ref.batch != 0:
            name = o.ref.relative()
            texts.append(f"{name} stands in another step than its batch: step t must end with U(t) and O(t) done")
        if o.ref.stage == "W" and o.ref.batch < -1:
            name = o.ref.relative()
            texts.append(f"{name} writes back later than the step after its batch, when training may have ended")
    return texts


def _structure(template: Schedule) -> list[Problem]:
    problems = []
    counts: dict[tuple[str, int], int] = {}
    for o in template.ops:
        counts[o.ref.stage, o.ref.micro] = counts.get((o.ref.stage, o.ref.micro), 0) + 1
        if o.ref.micro > template.micro_batches:
            problems.append(
                Problem("malformed", f"{o.ref.relative()} names a micro-batch beyond {template.micro_batches}")
            )
    for (stage, micro), count in counts.items():
        if count > 1:
            name = stage + (f".{micro}" if micro else "")
            problems.append(Problem("malformed", f"{name} stands {count} times in a step; each operation runs once"))
    for o in template.ops:
        for ref in o.after:
            if (ref.stage, ref.micro) not in counts:
                text = f"{o.ref.relative()} waits for {ref.relative()}, which the schedule never runs"
                problems.append(Problem("malformed", text))
    groups: dict[str, set[str]] = {}
    for o in template.ops:
        if o.stage.group:
            groups.setdefault(o.stage.group, set()).add(o.lane)
    for group, lanes in groups.items():
        if len(lanes) > 1:
            text = f"the collectives of group '{group}' are spread over lanes {', '.join(sorted(lanes))}"
            problems.append(Problem("malformed", text + ": ranks could issue them in different orders"))
    return problems


def _forward_edges(template: Schedule) -> list[Problem]:
    """Edges against schedule order: the list run one at a time breaks them, and a lane would wait for a later step."""
    place = {(o.ref.stage, o.ref.micro): (o.ref.batch, n) for n, o in enumerate(template.ops)}
    problems = []
    for n, o in enumerate(template.ops):
        for ref in o.after:
            offset, position = place[ref.stage, ref.micro]
            if (ref.batch - offset, position) >= (0, n):
                text = f"{o.ref.relative()} waits for {ref.relative()}, which stands after it in schedule order"
                problems.append(Problem("malformed", text + ": run one at a time, the list breaks its own edge"))
    return problems


def _races(template: Schedule, ops: Sequence[Op], before: dict[int, int], batches: int) -> list[Problem]:
    users: dict[tuple[str, int], list[tuple[int, bool]]] = {}
    for i, o in enumerate(ops):
        if not 0 <= o.ref.batch < batches:
            continue
        access = dict.fromkeys((template.slot(r, o.ref) for r in o.reads), False)
        access.update(dict.fromkeys((template.slot(r, o.ref) for r in o.writes), True))
        for slot, writes in access.items():
            users.setdefault(slot, []).append((i, writes))
    found = []
    for slot, uses in users.items():
        for n, (i, i_writes) in enumerate(uses):
            for j, j_writes in uses[n + 1 :]:
                if (i_writes or j_writes) and not (before[j] >> i & 1 or before[i] >> j & 1):
                    found.append((slot, i, j, i_writes and j_writes))
    # Buffers first: the symbolic rows live there, and other races are often their consequence.
    found.sort(key=lambda f: (f[0][0] != "buffer", f[1], f[2]))
    problems = []
    for (name, index), i, j, both in found:
        share = "both write" if both else "use, one of them writing,"
        where = name if name in GLOBALS else f"{name} slot {index}"
        text = f"{ops[i].ref} and {ops[j].ref} {share} {where}, and nothing orders them"
        problems.append(Problem("race", text, (ops[i].ref, ops[j].ref)))
    return problems


def _marks(template: Schedule) -> list[Problem]:
    meaning = {
        "lossy": "moves values at reduced precision",
        "update_rule": "changes the update rule, so what is learned differs from plain synchronous training",
    }
    return [
        Problem(mark, f"{o.ref.relative()} ({o.stage.title}) {meaning.get(mark, 'is marked ' + mark)}")
        for o in template.ops
        for mark in o.marks
    ]
