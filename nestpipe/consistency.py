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

from nestpipe.schedule import Op, Schedule
from nestpipe.symbolic import value_problems

#: One symbolic row per subset of this many consecutive batches.
SYMBOLIC_BATCHES = 6


@dataclass(frozen=True)
class Problem:
    """``kind``: malformed, deadlock, race, stale, incomplete, order, lossy or update_rule; ``text``: one sentence."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def check(template: Schedule, batches: int = SYMBOLIC_BATCHES) -> list[Problem]:
    """Everything that keeps ``template`` from being synchronous training; an empty list where nothing does."""
    problems = _structure(template)
    if problems:
        return problems
    ops = template.unroll(batches)
    before = ordered_before(ops)
    if isinstance(before, str):
        return [Problem("deadlock", before)]
    problems = _races(template, ops, before)
    if problems:
        return problems
    return [Problem(*p) for p in value_problems(template, linear_extension(ops), batches)] + _marks(template)


def is_synchronous(template: Schedule) -> bool:
    return not check(template)


def predecessors(ops: Sequence[Op]) -> list[list[int]]:
    """Per operation the indices that must be done before it: its edges, and its predecessor on the lane."""
    index = {o.ref: i for i, o in enumerate(ops)}
    last: dict[str, int] = {}
    result = []
    for i, o in enumerate(ops):
        needs = [index[ref] for ref in o.after if ref in index]
        if o.lane in last:
            needs.append(last[o.lane])
        last[o.lane] = i
        result.append(sorted(set(needs)))
    return result


def linear_extension(ops: Sequence[Op]) -> list[Op]:
    """A legal order, one op at a time, as close to schedule order as the edges allow. Cyclic ops are left out."""
    needs = predecessors(ops)
    done = [False] * len(ops)
    order: list[Op] = []
    waiting = list(range(len(ops)))
    while waiting:
        ready = next((i for i in waiting if all(done[j] for j in needs[i])), None)
        if ready is None:
            break
        done[ready] = True
        waiting.remove(ready)
        order.append(ops[ready])
    return order


def ordered_before(ops: Sequence[Op]) -> dict[int, int] | str:
    """Per op index a bit set of the indices that are done before it starts, or a sentence naming a cycle."""
    needs = predecessors(ops)
    position = {o.ref: i for i, o in enumerate(ops)}
    before: dict[int, int] = {}
    for o in linear_extension(ops):
        i = position[o.ref]
        bits = 0
        for j in needs[i]:
            bits |= before[j] | 1 << j
        before[i] = bits
    if len(before) == len(ops):
        return before
    # Walk backwards among the operations that can never start until one repeats.
    path = [next(i for i in range(len(ops)) if i not in before)]
    while path[-1] not in path[:-1]:
        path.append(next(j for j in needs[path[-1]] if j not in before))
    cycle = path[path.index(path[-1]) :]
    return "no rank can go on: " + " waits for ".join(str(ops[i].ref) for i in cycle)


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


def _races(template: Schedule, ops: Sequence[Op], before: dict[int, int]) -> list[Problem]:
    users: dict[tuple[str, int], list[tuple[int, bool]]] = {}
    for i, o in enumerate(ops):
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
    texts = []
    for (name, index), i, j, both in found:
        share = "both write" if both else "use, one of them writing,"
        where = name if name in ("table", "dense", "dense_gradient") else f"{name} slot {index}"
        texts.append(f"{ops[i].ref} and {ops[j].ref} {share} {where}, and nothing orders them")
    return [Problem("race", text) for text in texts]


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
