"""A training method is a schedule, and the schedule is data.

A schedule is the template of one steady-state step: operations with batch offsets relative to the
step (``R+1`` retrieves for the next batch), each with its lane, what must be done before it, and
the state it reads and writes. Unrolled over batches it is what the checker proves, the engine
runs, the simulator times and the drawing shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from nestpipe.schedule.stages import GLOBALS, MICRO_RINGS, STAGES, Stage

#: The largest window that schedules are made for; far more take minutes and gigabytes to lay out and check.
MOST_MICRO_BATCHES = 1024


class Ref(NamedTuple):
    """Names an operation: ``E12.3`` unrolled (batch 12), ``E+1.3`` in a template (the step's batch + 1)."""

    stage: str
    batch: int
    micro: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.batch}" + (f".{self.micro}" if self.micro else "")

    def relative(self) -> str:
        offset = f"{self.batch:+d}" if self.batch else ""
        return f"{self.stage}{offset}" + (f".{self.micro}" if self.micro else "")


@dataclass(frozen=True)
class Op:
    """One operation. ``after``, and ``ref.batch``, are relative to the step in a template and absolute once unrolled.

    ``reads``/``writes``: resource names, relative to the operation's own batch and micro-batch;
    what is written may also be read. ``marks``: what the graph cannot show (``lossy``, ``update_rule``).
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
        def moved(ref: Ref) -> Ref:
            return ref._replace(batch=ref.batch + by)

        return replace(self, ref=moved(self.ref), after=tuple(map(moved, self.after)))


@dataclass(frozen=True)
class Schedule:
    """The step template. The order of ``ops`` is the schedule order: of every lane, and of a run one op at a time."""

    name: str
    micro_batches: int
    ops: tuple[Op, ...]
    rings: Mapping[str, int]

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(op.lane for op in self.ops))

    @property
    def offsets(self) -> tuple[int, int]:
        """Smallest and largest batch offset in the template."""
        offsets = [op.ref.batch for op in self.ops]
        return min(offsets), max(offsets)

    @property
    def depth(self) -> int:
        """Steps before the first whole one: how far the furthest stage runs ahead."""
        return max(0, self.offsets[1])

    def unroll(self, batches: int) -> list[Op]:
        """The operations of batches 0..batches-1 in schedule order; edges to batches before 0 are dropped."""
        low, high = self.offsets

        def inside(ref: Ref) -> bool:
            return 0 <= ref.batch < batches

        ops = (op.shifted(step) for step in range(-high, batches - low) for op in self.ops)
        return [replace(op, after=tuple(filter(inside, op.after))) for op in ops if inside(op.ref)]

    def slot(self, resource: str, ref: Ref) -> tuple[str, int]:
        """The slot that ``resource`` (``buffer``, ``buffer-1``) means for an operation: name and index in the ring."""
        name, before = (resource[:-2], 1) if resource.endswith("-1") else (resource, 0)
        if name in GLOBALS:
            return name, 0
        if name in MICRO_RINGS:
            return name, (ref.batch * self.micro_batches + ref.micro - 1) % self.rings[name]
        return name, (ref.batch - before) % self.rings[name]
