"""The order among operations: what precedes what, a legal order of all, and the edges that reads and writes need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

from nestpipe.schedule.operations import Op, Ref, Schedule


def with_derived_edges(schedule: Schedule) -> Schedule:
    """``schedule`` with the edges that keep every conflicting pair (same slot, at least one writes) in schedule order.

    Edges that follow from lane order, given edges and other derived edges are left out. The result is free
    of races and gives the same bits as the list run one op at a time. Whether that list is synchronous
    training is for the checker to say.
    """
    depth = schedule.depth - min(0, schedule.offsets[0])
    # Enough batches that every ring has turned over before the step in the middle.
    turns = max(schedule.rings.values()) + 2
    batches, middle = 2 * depth + turns + 2, depth + turns
    steady = [(waiting, ref) for waiting, ref in _missing_edges(schedule, batches) if waiting.batch == middle]
    result = _with_edges(schedule, steady)
    # In the middle an order may run through neighbouring batches. Near the first and the last batch it is then missing.
    while (more := _with_edges(result, _missing_edges(result, batches))) != result:
        result = more
    return result


def _missing_edges(schedule: Schedule, batches: int) -> list[tuple[Ref, Ref]]:
    """Unrolled edges, (waiting operation, what it waits for), for the conflicting pairs that nothing orders yet."""
    ops = schedule.unroll(batches)
    seen: dict[tuple[str, int], tuple[int | None, list[int]]] = {}  # by slot: its last writer, and the readers since
    behind = [0] * len(ops)  # bit j of behind[i]: op j is done before op i starts
    missing: list[tuple[Ref, Ref]] = []
    for i, (o, needs) in enumerate(zip(ops, predecessors(ops), strict=True)):
        for j in needs:
            if j < i:
                behind[i] |= behind[j] | 1 << j
        conflicts: set[int] = set()
        for resource in o.reads:
            writer, _ = seen.get(schedule.slot(resource, o.ref), (None, []))
            conflicts.update([] if writer is None else [writer])
        for resource in o.writes:
            writer, readers = seen.get(schedule.slot(resource, o.ref), (None, []))
            conflicts.update(readers, [] if writer is None else [writer])
        for j in sorted(conflicts, reverse=True):
            if not behind[i] >> j & 1:
                behind[i] |= behind[j] | 1 << j
                missing.append((o.ref, ops[j].ref))
        for resource in o.reads:
            slot = schedule.slot(resource, o.ref)
            writer, readers = seen.get(slot, (None, []))
            seen[slot] = (writer, [*readers, i])
        for resource in o.writes:
            seen[schedule.slot(resource, o.ref)] = (i, [])
    return missing


def _with_edges(schedule: Schedule, edges: Sequence[tuple[Ref, Ref]]) -> Schedule:
    """``schedule`` with unrolled ``edges`` added, each made relative to the step of the waiting operation."""
    added: dict[str, dict[Ref, None]] = {}
    for waiting, ref in edges:
        name = waiting.in_step()
        step = waiting.batch - schedule.places[name].offset
        added.setdefault(name, {})[ref._replace(batch=ref.batch - step)] = None
    result = []
    for o in schedule.ops:
        found = added.get(o.ref.in_step(), {})
        result.append(replace(o, after=(*o.after, *(ref for ref in found if ref not in o.after))))
    return replace(schedule, ops=tuple(result))


def predecessors(ops: Sequence[Op]) -> list[list[int]]:
    """For each operation, the indices of those that must be done before it: its edges and its lane predecessor."""
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
    """A legal order, one op at a time, as close to schedule order as the edges allow. Ops in a cycle are left out."""
    needs = predecessors(ops)
    followers: list[list[int]] = [[] for _ in ops]
    for i, needed in enumerate(needs):
        for j in needed:
            followers[j].append(i)
    missing = [len(needed) for needed in needs]
    ready = [i for i, count in enumerate(missing) if not count]  # sorted, hence a heap
    order: list[Op] = []
    while ready:
        i = heappop(ready)
        order.append(ops[i])
        for j in followers[i]:
            missing[j] -= 1
            if not missing[j]:
                heappush(ready, j)
    return order


def ordered_before(ops: Sequence[Op]) -> dict[int, int] | str:
    """For each op index, a bit set of the indices that are done before it starts; or a sentence that names a cycle."""
    needs = predecessors(ops)
    position = {o.ref: i for i, o in enumerate(ops)}
    done: dict[int, int] = {}
    for o in linear_extension(ops):
        i = position[o.ref]
        bits = 0
        for j in needs[i]:
            bits |= done[j] | 1 << j
        done[i] = bits
    if len(done) == len(ops):
        return done
    # Walk backwards through the operations that can never start, until one repeats.
    path = [next(i for i in range(len(ops)) if i not in done)]
    while path[-1] not in path[:-1]:
        path.append(next(j for j in needs[path[-1]] if j not in done))
    cycle = path[path.index(path[-1]) :]
    return "no rank can continue: " + " waits for ".join(str(ops[i].ref) for i in cycle)
