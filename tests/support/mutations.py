"""Mutations of schedules, and runs of them in orders that their lanes and edges allow but nobody would choose."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from heapq import heappop, heappush

import torch

from nestpipe.checker.problem import Problem
from nestpipe.engine.engine import Engine
from nestpipe.engine.lanes import Execute, OneAtATime
from nestpipe.schedule.operations import Op, Ref, Schedule
from nestpipe.schedule.order import predecessors, with_derived_edges
from nestpipe.trainer import ModelSpec
from tests.support.engine_runs import SPEC, Outcome, Setting, train

Priority = Callable[[int, Op], object]


@dataclass(frozen=True)
class Mutant:
    """``kind``: what sort of change; ``what``: this one. ``derive``: drop all edges and derive them again."""

    kind: str
    what: str
    raw: Schedule
    derive: bool = False

    @cached_property
    def schedule(self) -> Schedule:
        if not self.derive:
            return self.raw
        return with_derived_edges(replace(self.raw, ops=tuple(replace(o, after=()) for o in self.raw.ops)))

    @property
    def key(self) -> tuple:
        """Equal for mutants that are the same schedule."""
        s = self.schedule
        return s.micro_batches, tuple((o.ref, o.lane, frozenset(o.after)) for o in s.ops), tuple(s.rings.items())


# ---- mutations ----------------------------------------------------------------------------------


def mutants(base: Schedule) -> Iterator[Mutant]:
    """Every single change of ``base``. If it moves operations, also with the edges derived again."""
    yield from _edges(base)
    yield from _operations(base)
    for m in _placements(base):
        yield m
        yield replace(m, kind=f"{m.kind}, derived", derive=True)


def twice(base: Schedule, count: int, seed: int) -> Iterator[Mutant]:
    """``count`` random pairs of changes, one on top of the other."""
    draw = random.Random(seed)
    first = [m for m in mutants(base) if not m.kind.startswith(("duplicate", "delete operation"))]
    for _ in range(count):
        one = draw.choice(first)
        two = draw.choice(list(mutants(one.schedule)))
        yield replace(two, kind="two changes", what=f"{one.kind} {one.what}; {two.kind} {two.what}")


def _with(base: Schedule, index: int, *ops: Op) -> Schedule:
    return replace(base, ops=(*base.ops[:index], *ops, *base.ops[index + 1 :]))


def _edges(base: Schedule) -> Iterator[Mutant]:
    for i, o in enumerate(base.ops):
        for n, edge in enumerate(o.after):
            rest = o.after[:n] + o.after[n + 1 :]
            name = f"{o.ref.relative()} after {edge.relative()}"
            yield Mutant("delete edge", name, _with(base, i, replace(o, after=rest)))
            others = [edge._replace(batch=edge.batch + by) for by in (-2, -1, 1)]
            others += [edge._replace(micro=m) for m in (edge.micro - 1, edge.micro + 1) if edge.micro and m]
            for other in others:
                changed = replace(o, after=(*rest, other))
                yield Mutant("retarget edge", f"{name}: {other.relative()}", _with(base, i, changed))


def _operations(base: Schedule) -> Iterator[Mutant]:
    for i, o in enumerate(base.ops):
        name = o.ref.relative()
        yield Mutant("duplicate operation", name, _with(base, i, o, o))
        early = o.shifted(1)
        yield Mutant("duplicate operation", f"{name} and {early.ref.relative()}", _with(base, i, o, early))
        left = []
        for other in (*base.ops[:i], *base.ops[i + 1 :]):
            kept = tuple(r for r in other.after if (r.stage, r.micro) != (o.ref.stage, o.ref.micro))
            left.append(replace(other, after=kept))
        less = replace(base, ops=tuple(left))
        yield Mutant("delete operation", name, less)
        yield Mutant("delete operation, derived", name, less, derive=True)


def _placements(base: Schedule) -> Iterator[Mutant]:
    """Changes of order, lane, offset, micro-batch and ring: all operations stay."""
    ops = list(base.ops)
    for i, o in enumerate(ops):
        name = o.ref.relative()
        rest = ops[:i] + ops[i + 1 :]
        for to in range(len(ops)):
            if to != i:
                kind = "swap neighbours" if to == i + 1 else "move"
                yield Mutant(kind, f"{name} to place {to}", replace(base, ops=(*rest[:to], o, *rest[to:])))
        for lane in (*base.lanes, "extra"):
            if lane != o.lane:
                yield Mutant("change lane", f"{name} on {lane}", _with(base, i, replace(o, lane=lane)))
        for by in (-1, 1):
            moved = o.shifted(by)
            yield Mutant("change offset", f"{name} to {moved.ref.relative()}", _with(base, i, moved))
            alone = replace(o, ref=moved.ref)
            yield Mutant("change offset, edges stay", f"{name} to {alone.ref.relative()}", _with(base, i, alone))
        for j in range(i + 1, len(ops)):
            if ops[j].ref.stage == o.ref.stage:
                swapped = ops.copy()
                swapped[i], swapped[j] = replace(ops[j], after=o.after), replace(o, after=ops[j].after)
                what = f"{name} and {ops[j].ref.relative()}"
                yield Mutant("swap micro-batches", what, replace(base, ops=tuple(swapped)))
    for ring, size in base.rings.items():
        for new in sorted({1, size - 1, size + 1, size + 3} - {0, size}):
            yield Mutant("change ring", f"{ring}={new}", replace(base, rings={**base.rings, ring: new}))


# ---- legal orders -------------------------------------------------------------------------------


def legal_order(ops: Sequence[Op], priority: Priority) -> list[Op] | None:
    """Always runs the first by ``priority`` of the operations that may run next; None if none may (a deadlock)."""
    needs = predecessors(ops)
    followers: list[list[int]] = [[] for _ in ops]
    for i, before in enumerate(needs):
        for j in before:
            followers[j].append(i)
    missing = [len(before) for before in needs]
    ready = [(priority(i, o), i) for i, o in enumerate(ops) if not missing[i]]
    ready.sort()
    order = []
    while ready:
        _, i = heappop(ready)
        order.append(ops[i])
        for j in followers[i]:
            missing[j] -= 1
            if not missing[j]:
                heappush(ready, (priority(j, ops[j]), j))
    return order if len(order) == len(ops) else None


def reversed_pair(ops: Sequence[Op], first: Ref, second: Ref) -> list[Priority]:
    """Priorities under which ``second`` runs before ``first``: as early as possible, or ``first`` as late as can be."""
    index = {o.ref: i for i, o in enumerate(ops)}
    needs = predecessors(ops)
    wanted, open_ends = set(), [index[second]]
    while open_ends:
        i = open_ends.pop()
        if i not in wanted:
            wanted.add(i)
            open_ends += needs[i]
    return [lambda i, o: (i not in wanted, i), lambda i, o: (o.ref == first, i)]


def adversaries(ops: Sequence[Op], problems: Sequence[Problem], seed: int, draws: int) -> Iterator[Priority]:
    """Orders to try: schedule order, reported races turned round, and ``draws`` of: a lane or stage rushed or
    delayed as far as possible, operations shuffled.
    """
    yield lambda i, o: (i,)
    races = {}
    for problem in problems:
        if problem.ops:  # one race between two stages is enough, in the middle of the run
            kind = tuple((r.stage, r.micro) for r in problem.ops)
            races.setdefault((kind, problem.ops[1].batch - problem.ops[0].batch), []).append(problem.ops)
    for pairs in races.values():
        pair = pairs[len(pairs) // 2]
        yield from reversed_pair(ops, *pair)
        yield from reversed_pair(ops, *reversed(pair))
    choices: list[Priority] = []
    for lane in dict.fromkeys(o.lane for o in ops):
        choices += [lambda i, o, x=lane: (o.lane != x, i), lambda i, o, x=lane: (o.lane == x, i)]
    for stage in dict.fromkeys(o.ref.stage for o in ops):
        choices += [lambda i, o, x=stage: (o.ref.stage == x, i)]
    draw = random.Random(seed)
    choices += [lambda i, o, x=salt: (hash((x, i)), i) for salt in [draw.random() for _ in range(8)]]
    yield from draw.sample(choices, min(draws, len(choices)))


# ---- runs ---------------------------------------------------------------------------------------


class InOrder(OneAtATime):
    """Lanes that run unrolled operations in an order of the test's own, all of them at the first step."""

    def __init__(self, schedule: Schedule, execute: Execute, order: Sequence[Op]):
        super().__init__(schedule, execute)
        self._order = list(order)

    def run_step(self, step: int) -> None:
        for o in self._order:
            self._execute(o.ref)
        self._order.clear()


def run_in_order(schedule: Schedule, setting: Setting, order: Sequence[Op], spec: ModelSpec = SPEC) -> Outcome:
    """Execute unrolled operations one by one on this thread; raises what the engine raises."""
    lanes = partial(InOrder, order=order)
    engine = Engine(schedule, spec, setting.sparse_optimizer, setting.dense_optimizer, 3, lanes)
    try:
        batches = iter(setting.batches(0))
        # All operations run in the first step, so every batch is given its iterator before that.
        engine._source.give(range(1 + max((o.ref.batch for o in order), default=0)), batches)
        outcome = train(engine, batches, None)
        state = engine.state_dict()
    finally:
        engine.close()
    outcome.tensors = {"weight": state["weight"], "row state": state["state"], **state["dense"]}
    for index, values in state["dense_optimizer"]["state"].items():
        outcome.tensors |= {f"dense state {index} {k}": torch.as_tensor(v) for k, v in values.items()}
    return outcome
