"""A training method is a schedule, and the schedule is data.

A schedule is the template of one steady-state step. Its operations have batch offsets relative to the
step: ``R+1`` retrieves for the next batch. Each has its lane, what must be done before it, and the
state that it reads and writes. Unrolled over batches, the schedule is what the checker proves, the
engine runs, the simulator times and the drawing shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from nestpipe.schedule.stages import GLOBALS, MICRO_RINGS, STAGES, Stage

#: The largest window that schedules are made for. Much larger ones take minutes and gigabytes to unroll and check.
MAX_MICRO_BATCHES = 1024
#: The most batches that a ring holds, and that a step spans. The checker unrolls a few more, one bit for each.
MAX_BATCHES = 48
#: The most batches whose micro-batches fit into a ring of micro-batches: it has to turn over twice.
MAX_BATCHES_OF_MICRO = 24


class Ref(NamedTuple):
    """Names an operation: ``E12.3`` when unrolled (batch 12), ``E+1.3`` in a template (the step's batch + 1)."""

    stage: str
    batch: int
    micro: int = 0

    def __str__(self) -> str:
        return self._named(str(self.batch))

    def relative(self) -> str:
        """The name in a schedule: ``R+1``, ``E.2``."""
        return self._named(f"{self.batch:+d}" if self.batch else "")

    def in_step(self) -> str:
        """The name without the batch, ``E.3``. It is unique among the operations of a step."""
        return self._named("")

    def _named(self, batch: str) -> str:
        return f"{self.stage}{batch}" + (f".{self.micro}" if self.micro else "")


@dataclass(frozen=True)
class Op:
    """One operation. ``after`` and ``ref.batch`` are relative to the step in a template, and absolute once unrolled.

    ``reads`` and ``writes``: resource names, relative to the operation's own batch and micro-batch. A resource
    that is written may also be read. ``marks``: what the graph cannot show (``lossy``, ``update_rule``).
    """

    ref: Ref
    lane: str
    after: tuple[Ref, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    @property
    def stage(self) -> Stage:
        return STAGES[self.ref.stage]

    def shifted(self, by: int) -> Op:
        after = tuple(ref._replace(batch=ref.batch + by) for ref in self.after)
        return replace(self, ref=self.ref._replace(batch=self.ref.batch + by), after=after)


class Place(NamedTuple):
    """An operation's place in its step: batch ``offset``, ``position`` in the step, and position ``on_lane``."""

    lane: str
    offset: int
    position: int
    on_lane: int


@dataclass(frozen=True)
class Schedule:
    """The step template. ``ops`` are in schedule order, which every lane and a run one op at a time follow."""

    name: str
    micro_batches: int
    ops: tuple[Op, ...]
    rings: Mapping[str, int]

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(op.lane for op in self.ops))

    @cached_property
    def offsets(self) -> tuple[int, int]:
        """The smallest and the largest batch offset of all operations."""
        offsets = [op.ref.batch for op in self.ops]
        return min(offsets), max(offsets)

    @cached_property
    def depth(self) -> int:
        """The number of steps before the first complete one: how far the furthest stage runs ahead."""
        return max(0, self.offsets[1])

    @cached_property
    def places(self) -> Mapping[str, Place]:
        """Each operation's place, by its name in the step (``Ref.in_step``)."""
        found: dict[str, Place] = {}
        count = dict.fromkeys(self.lanes, 0)
        for position, op in enumerate(self.ops):
            found[op.ref.in_step()] = Place(op.lane, op.ref.batch, position, count[op.lane])
            count[op.lane] += 1
        return found

    @cached_property
    def updates_table(self) -> bool:
        """Whether U updates the host table itself, so that there is no buffer to write back."""
        return any(op.ref.stage == "U" and "table" in op.writes for op in self.ops)

    @cached_property
    def replicated(self) -> bool:
        """Whether tables are replicated over groups of ranks, in which case stage D keeps the replicas equal."""
        return any(op.ref.stage == "D" for op in self.ops)

    @cached_property
    def averages_replicas(self) -> bool:
        """Whether each group updates its own replica and D averages the replicas; if not, D sums gradients before U."""
        return any(op.ref.stage == "D" and "accumulator" not in op.writes for op in self.ops)

    def unroll(self, batches: int) -> list[Op]:
        """The operations of batches 0..batches-1 in schedule order. Edges to batches outside that range are dropped."""
        low, high = self.offsets
        inside = range(batches)
        ops = (op.shifted(step) for step in range(-high, batches - low) for op in self.ops)
        return [
            replace(op, after=tuple(ref for ref in op.after if ref.batch in inside))
            for op in ops
            if op.ref.batch in inside
        ]

    def slot(self, resource: str, ref: Ref) -> tuple[str, int]:
        """Name and index of the ring slot that ``resource`` (``buffer``, ``buffer-1``) means for an operation."""
        if resource in GLOBALS:
            return resource, 0
        if resource in MICRO_RINGS:
            return resource, (ref.batch * self.micro_batches + ref.micro - 1) % self.rings[resource]
        name, batch = (resource[:-2], ref.batch - 1) if resource.endswith("-1") else (resource, ref.batch)
        return name, batch % self.rings[name]


def beyond_limits(schedule: Schedule) -> str:
    """A sentence on a ring or an offset that is larger than the checker can follow; empty otherwise."""
    for name, size in schedule.rings.items():
        most = MAX_BATCHES_OF_MICRO * schedule.micro_batches if name in MICRO_RINGS else MAX_BATCHES
        if size > most:
            return f"ring {name}={size} is larger than anything needs: use at most {most}"
    low, high = schedule.offsets
    if high - low > MAX_BATCHES:
        return f"its operations are of batches {low:+d} to {high:+d}: one step may span at most {MAX_BATCHES} batches"
    return ""
