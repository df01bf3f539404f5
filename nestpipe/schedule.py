"""A training method is a schedule, and the schedule is data.

A schedule is the template of one steady-state step: operations with batch offsets relative to the
step (``R+1`` retrieves for the next batch), each with its lane, what must be done before it, and
the state it reads and writes. Unrolled over batches it is what the checker proves, the engine
runs, the simulator times and the drawing shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

#: The largest window that schedules are made for; far more take minutes and gigabytes to lay out and check.
MOST_MICRO_BATCHES = 1024


@dataclass(frozen=True)
class Stage:
    """What a stage letter means. ``group``: the process group its collective runs on, None for local work.

    ``reads`` and ``writes``: resources, with ``-1`` for the slot of the batch before.
    """

    title: str
    lane: str
    category: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    per_micro_batch: bool = False
    group: str | None = None


STAGES: Mapping[str, Stage] = {
    "P": Stage("data prefetch", "input", "input", (), ("input",)),
    "H": Stage("data H2D", "copy", "lookup", ("input",), ("batch",)),
    "K": Stage("key routing", "keys", "lookup", ("input", "plan-1"), ("plan",), group="keys"),
    "R": Stage("embedding retrieval", "rows", "lookup", ("plan", "table"), ("buffer",)),
    "S": Stage("dual-buffer synchronisation", "compute", "update", ("plan", "buffer-1"), ("buffer",)),
    "E": Stage("embedding All2All", "all2all", "communication", ("plan", "buffer"), ("received",), True, "all2all"),
    # "module": while F runs, the model's modules hold the micro-batch at hand.
    "F": Stage(
        "dense forward", "compute", "dense", ("batch", "plan", "received", "dense"), ("activation", "module"), True
    ),
    "B": Stage(
        "dense backward",
        "compute",
        "dense",
        ("batch", "plan", "received", "activation", "dense"),
        ("gradient", "dense_gradient"),
        True,
    ),
    "G": Stage("gradient All2All", "all2all", "communication", ("plan", "gradient"), ("accumulator",), True, "all2all"),
    # Tables that are replicated over groups of ranks: what U needs of the other groups, or the replicas made equal.
    "D": Stage(
        "replica synchronisation", "replicas", "communication", ("plan", "arrived"), ("accumulator",), True, "replicas"
    ),
    "A": Stage("dense AllReduce", "allreduce", "dense_sync", ("plan",), ("dense_gradient",), group="allreduce"),
    "U": Stage("sparse update", "compute", "update", ("plan",), ("accumulator", "buffer")),
    "O": Stage("dense optimizer step", "compute", "update", ("batch", "plan"), ("dense_gradient", "dense")),
    "W": Stage("write-back", "rows", "lookup", ("plan", "buffer"), ("table",)),
}

#: How many slots a resource has by default; ``global`` state has one that all batches share.
#: Batch rings turn with the batch, micro rings with the micro-batch (counted across batches).
BATCH_RINGS = {"input": 3, "batch": 4, "plan": 4, "buffer": 2, "accumulator": 2}
MICRO_RINGS = {"received": 3, "activation": 1, "gradient": 3, "arrived": 3}
GLOBALS = ("table", "dense", "dense_gradient", "module")


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
        move = lambda ref: ref._replace(batch=ref.batch + by)  # noqa: E731
        return replace(self, ref=move(self.ref), after=tuple(map(move, self.after)))


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
        inside = lambda ref: 0 <= ref.batch < batches  # noqa: E731
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


def op(text: str, after: str = "", lane: str | None = None, marks: Iterable[str] = (), **access: str) -> Op:
    """``op("R+1", after="K+1 W-1")``; lane, reads and writes are the stage's own unless given."""
    ref = parse_ref(text)
    stage = STAGES[ref.stage]
    reads = tuple(access["reads"].split()) if "reads" in access else stage.reads
    writes = tuple(access["writes"].split()) if "writes" in access else stage.writes
    return Op(ref, lane or stage.lane, tuple(map(parse_ref, after.split())), reads, writes, tuple(marks))


def parse_ref(text: str) -> Ref:
    """Parse ``R+1``, ``E.3``, ``E+1.3``, ``E12.3``. Raises ValueError naming the text."""
    head, _, micro = text.partition(".")
    try:
        ref = Ref(head[:1], int(head[1:] or 0), int(micro) if micro else 0)
    except ValueError:
        raise ValueError(
            f"'{text}' is no operation: expected a stage letter, an offset and a micro-batch, as in E+1.3"
        ) from None
    if ref.stage not in STAGES:
        raise ValueError(f"'{text}': unknown stage '{ref.stage}', one of {' '.join(STAGES)}")
    if STAGES[ref.stage].per_micro_batch != (ref.micro > 0):
        need = "needs a micro-batch, as in E.1" if STAGES[ref.stage].per_micro_batch else "has no micro-batch"
        raise ValueError(f"'{text}': stage {ref.stage} ({STAGES[ref.stage].title}) {need}")
    return ref


def schedule(name: str, micro_batches: int, ops: Sequence[Op], derive: bool = True, **rings: int) -> Schedule:
    """A schedule whose missing edges follow from its reads and writes, unless ``derive`` is off. Raises ValueError."""
    if micro_batches < 1:
        raise ValueError(f"schedule {name}: micro_batches is {micro_batches}, must be at least 1")
    result = Schedule(name, micro_batches, tuple(ops), {**BATCH_RINGS, **MICRO_RINGS, **rings})
    return with_derived_edges(result) if derive else result


def with_derived_edges(template: Schedule) -> Schedule:
    """Add the edges that keep every conflicting pair (same slot, one writes) in schedule order.

    Edges that follow from lane order, given edges and other derived ones are left out. The result
    is free of races and bit-equal to the list run one op at a time; whether that list itself is
    synchronous training is the checker's question.
    """
    depth = template.depth - min(0, template.offsets[0])
    # Long enough that one step in the middle sees every ring turn over behind it.
    turns = max(template.rings.values()) + 2
    batches, middle = 2 * depth + turns + 2, depth + turns
    steady = [(waiting, ref) for waiting, ref in _missing_edges(template, batches) if waiting.batch == middle]
    result = _with_edges(template, steady)
    # Near the first and the last batch an order may be missing that elsewhere runs through batches beyond them.
    while (more := _with_edges(result, _missing_edges(result, batches))) != result:
        result = more
    return result


def _missing_edges(template: Schedule, batches: int) -> list[tuple[Ref, Ref]]:
    """Unrolled (waiting operation, what it waits for) that order the conflicting pairs which nothing orders yet."""
    ops = template.unroll(batches)
    index = {o.ref: i for i, o in enumerate(ops)}
    seen: dict[tuple[str, int], tuple[int | None, list[int]]] = {}
    last_on_lane: dict[str, int] = {}
    behind = [0] * len(ops)  # bit j of behind[i]: op j is done before op i starts
    missing: list[tuple[Ref, Ref]] = []
    for i, o in enumerate(ops):
        needs = [index[ref] for ref in o.after if index.get(ref, i) < i]
        if o.lane in last_on_lane:
            needs.append(last_on_lane[o.lane])
        last_on_lane[o.lane] = i
        for j in needs:
            behind[i] |= behind[j] | 1 << j
        conflicts: set[int] = set()
        for resource in o.reads:
            writer, _ = seen.get(template.slot(resource, o.ref), (None, []))
            conflicts.update([] if writer is None else [writer])
        for resource in o.writes:
            writer, readers = seen.get(template.slot(resource, o.ref), (None, []))
            conflicts.update(readers, [] if writer is None else [writer])
        for j in sorted(conflicts, reverse=True):
            if not behind[i] >> j & 1:
                behind[i] |= behind[j] | 1 << j
                missing.append((o.ref, ops[j].ref))
        for resource in o.reads:
            slot = template.slot(resource, o.ref)
            writer, readers = seen.get(slot, (None, []))
            seen[slot] = (writer, [*readers, i])
        for resource in o.writes:
            seen[template.slot(resource, o.ref)] = (i, [])
    return missing


def _with_edges(template: Schedule, edges: Sequence[tuple[Ref, Ref]]) -> Schedule:
    """``template`` with unrolled ``edges`` added, each made relative to the step of the operation that waits."""
    added: dict[tuple[str, int], dict[Ref, None]] = {}
    offset = {(o.ref.stage, o.ref.micro): o.ref.batch for o in template.ops}
    for waiting, ref in edges:
        step = waiting.batch - offset[waiting.stage, waiting.micro]
        added.setdefault((waiting.stage, waiting.micro), {})[ref._replace(batch=ref.batch - step)] = None
    result = []
    for o in template.ops:
        found = added.get((o.ref.stage, o.ref.micro), {})
        result.append(replace(o, after=(*o.after, *(ref for ref in found if ref not in o.after))))
    return replace(template, ops=tuple(result))


def folded(template: Schedule, into: Mapping[str, str]) -> Schedule:
    """The schedule with the operations of some lanes moved to another, in schedule order.

    Where a lane would have nothing to wait for, such as All2All on one rank, its hand-offs are all
    that it would cost.
    """
    return replace(template, ops=tuple(replace(o, lane=into.get(o.lane, o.lane)) for o in template.ops))


def marked(template: Schedule, stages: str, mark: str) -> Schedule:
    """The schedule with ``mark`` on every operation of the stages, given by their letters."""
    added = lambda o: replace(o, marks=(*o.marks, mark)) if o.ref.stage in stages else o  # noqa: E731
    return replace(template, ops=tuple(map(added, template.ops)))


def one_at_a_time(ops: Sequence[Op]) -> list[Op]:
    """Chain the ops of a step: each waits for the one before it, the first for the last of the step before."""
    previous = [ops[-1].ref._replace(batch=ops[-1].ref.batch - 1), *(o.ref for o in ops[:-1])]
    return [replace(o, after=(before,)) for o, before in zip(ops, previous, strict=True)]


# ---- the methods that this engine runs ----------------------------------------------------------


def serial(micro_batches: int = 1) -> Schedule:
    """Unpipelined synchronous training: nothing runs beside anything. ``serial(N)`` splits the dense part."""
    steps = [op(stage) for stage in "PHKR"]
    for m in range(1, micro_batches + 1):
        steps += [op(f"{stage}.{m}") for stage in "EFBG"]
    steps += [op(stage) for stage in "AUOW"]
    name = "serial" if micro_batches == 1 else f"serial({micro_batches})"
    return schedule(name, micro_batches, one_at_a_time(steps), derive=False)


def frozen_window(micro_batches: int, received: int) -> list[Op]:
    """FWP: of 2N All2Alls, E runs up to ``received`` micro-batches ahead of the compute lane, G one behind it."""
    ops: list[Op] = []
    for m in range(1, micro_batches + 1):
        ops += [op(f"{stage}.{m}") for stage in "FBG"]
        if m + received <= micro_batches:
            ops.append(op(f"E.{m + received}"))
    return ops


def nestpipe(micro_batches: int = 8, received: int = 3, name: str = "nestpipe") -> Schedule:
    """NestPipe (paper, DBP and FWP): lookups hidden behind the previous batch, exchanges behind dense compute.

    ``received``: micro-batches whose embeddings may have arrived and still be unused. U waits for
    the gradients and O for the AllReduce; S and the first All2All of the next batch wait for U alone.
    """
    first = [op(f"E.{m}") for m in range(2, min(received, micro_batches) + 1)]
    ahead = [op("P+4"), op("H+3"), op("K+2"), op("W-1"), op("R+1")]
    end = [op("A"), op("U"), op("S+1"), op("E+1.1"), op("O")]
    ops = [*ahead, *first, *frozen_window(micro_batches, received), *end]
    return schedule(name, micro_batches, ops, received=received)


def dbp_only() -> Schedule:
    """Dual-buffer pipelining alone: one micro-batch, so both All2Alls of a batch are exposed."""
    return nestpipe(1, name="dbp-only")


def fwp_only(micro_batches: int = 8, received: int = 3) -> Schedule:
    """Frozen-window pipelining alone: the batch is read, routed and retrieved only when the one before is done."""
    lookup = [op("P", after="O-1 W-1"), op("H", after="P"), op("K", after="H"), op("R", after="K")]
    first = [op(f"E.{m}") for m in range(1, min(received, micro_batches) + 1)]
    ops = [*lookup, *first, *frozen_window(micro_batches, received), op("A"), op("U"), op("O"), op("W")]
    return schedule("fwp-only", micro_batches, ops, received=received)
