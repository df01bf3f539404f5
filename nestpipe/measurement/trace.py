"""What ran when, and on which lane of which rank: spans, timelines of all ranks, and the Perfetto export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from nestpipe.machine.json_files import json_text
from nestpipe.schedule.building import parse_ref
from nestpipe.schedule.operations import Op, Ref
from nestpipe.schedule.order import predecessors
from nestpipe.schedule.stages import STAGES


class Span(NamedTuple):
    """One operation, or a piece of one, on one rank. Times are ``time.perf_counter_ns`` of the rank's own clock.

    ``stage``: the letter of the stage (see ``schedule.STAGES``). ``batch``: absolute batch number.
    ``micro``: 1-based micro-batch, 0 for an operation on the whole batch.
    """

    stage: str
    batch: int
    micro: int
    lane: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """The same operations on several ranks, in schedule order, on one clock. Times in seconds.

    ``start``, ``ready``, ``end``: float64 [ops, ranks]. ``ready`` is when the last rank entered a collective
    (``start`` for local work), so ``ready - start`` is skew. ``waited_for``: int64 [ops, most], indices of the
    operations that each operation may have waited for, padded with -1.
    """

    refs: tuple[Ref, ...]
    lanes: tuple[str, ...]
    start: np.ndarray
    ready: np.ndarray
    end: np.ndarray
    waited_for: np.ndarray

    @property
    def ranks(self) -> int:
        return self.start.shape[1]


def scheduled_timeline(
    ops: Sequence[Op], spans: Sequence[Sequence[Span]], offsets: Sequence[float], groups: int = 1
) -> Timeline:
    """The timeline of an engine's run. It has one span per operation and rank; the schedule says what each waited for.

    ``ops``: the run's operations in schedule order, with batches numbered as in the spans. Those without a span on
    some rank are left out. ``spans``: those of each rank. ``offsets``: seconds to add to each rank's clock.
    ``groups``: the number of replica groups, if the schedule has a stage D. Rank r is in group r mod ``groups``.
    """
    times = [{Ref(s.stage, s.batch, s.micro): (s.start, s.end) for s in rank} for rank in spans]
    # An engine may fold lanes that have nothing to wait for. The spans say on which lane each operation ran.
    lanes = {Ref(s.stage, s.batch, s.micro): s.lane for s in spans[0]}
    kept = [replace(op, lane=lanes[op.ref]) for op in ops if all(op.ref in rank for rank in times)]
    raw = np.array([[rank[op.ref] for rank in times] for op in kept], dtype=np.float64).reshape(
        len(kept), len(times), 2
    )
    clock = raw * 1e-9 + np.asarray(offsets, dtype=np.float64)[None, :, None]
    start, end = clock[..., 0], clock[..., 1]
    refs = tuple(op.ref for op in kept)
    return Timeline(refs, tuple(op.lane for op in kept), start, _ready(refs, start, groups), end, waits(kept))


def observed_timelines(spans: Sequence[Sequence[Span]], offsets: Sequence[float], groups: int = 1) -> list[Timeline]:
    """Timelines, one per rank, of a method whose order is only observed, such as TorchRec's.

    A span may be a piece of an operation. It is taken to have waited for whatever ended last before it began, on
    any lane. That is exact if one host thread issues everything. ``groups`` is as for ``scheduled_timeline``.
    """
    entered: dict[tuple[Ref, int], float] = {}
    for r, (rank, offset) in enumerate(zip(spans, offsets, strict=True)):
        first: dict[Ref, float] = {}
        for s in rank:
            ref = Ref(s.stage, s.batch, s.micro)
            first[ref] = min(first.get(ref, np.inf), s.start * 1e-9 + offset)
        for ref, at in first.items():
            place = ref, _collective_members(ref, r, groups)
            entered[place] = max(entered.get(place, -np.inf), at)
    timelines = []
    for r, (rank, offset) in enumerate(zip(spans, offsets, strict=True)):
        ordered = sorted(rank, key=lambda s: (s.start, s.end))
        start = np.array([s.start for s in ordered]) * 1e-9 + offset
        end = np.array([s.end for s in ordered]) * 1e-9 + offset
        refs = tuple(Ref(s.stage, s.batch, s.micro) for s in ordered)
        collective = np.array([STAGES[ref.stage].group is not None for ref in refs], dtype=bool)
        ready = np.where(
            collective, np.clip([entered[ref, _collective_members(ref, r, groups)] for ref in refs], start, end), start
        )
        by_end = np.argsort(end, kind="stable")
        position = np.searchsorted(end[by_end], start, side="right") - 1
        # An operation of zero length ends when it begins. Nothing waits for itself or for what comes after it.
        while (later := (position >= 0) & (by_end[position] >= np.arange(len(start)))).any():
            position[later] -= 1
        waited_for = np.where(position >= 0, by_end[position], -1)
        lanes = tuple(s.lane for s in ordered)
        timelines.append(Timeline(refs, lanes, start[:, None], ready[:, None], end[:, None], waited_for[:, None]))
    return timelines


def waits(ops: Sequence[Op]) -> np.ndarray:
    """int64 [ops, most]: indices of each operation's edges and of its predecessor on the lane, padded with -1."""
    lists = predecessors(ops)
    table = np.full((len(ops), max(map(len, lists), default=0) or 1), -1, dtype=np.int64)
    for i, needs in enumerate(lists):
        table[i, : len(needs)] = needs
    return table


def _collective_members(ref: Ref, rank: int, groups: int) -> int:
    """A number shared by the ranks that run this collective together: a group for All2Alls, a shard for replicas."""
    return {"all2all": rank % groups, "replicas": rank // groups}.get(str(STAGES[ref.stage].group), 0)


def _ready(refs: Sequence[Ref], start: np.ndarray, groups: int) -> np.ndarray:
    """The time at which the last rank of each one's group entered; ``start`` for operations that wait for no rank."""
    ready = start.copy()
    for i, ref in enumerate(refs):
        if STAGES[ref.stage].group is not None:
            members = np.array([_collective_members(ref, rank, groups) for rank in range(start.shape[1])])
            for number in set(members):
                ready[i, members == number] = start[i, members == number].max()
    return ready


def perfetto(timelines: Sequence[Timeline], title: str) -> dict[str, Any]:
    """Chrome trace events, with times in microseconds: a process per rank, a track per lane, colours by stage.

    ``timelines`` together have all ranks in order. ui.perfetto.dev and chrome://tracing open the result.
    """
    events: list[dict[str, Any]] = []
    origin = min((float(t.start.min()) for t in timelines if t.start.size), default=0.0)
    rank = 0
    for timeline in timelines:
        lanes = {lane: i for i, lane in enumerate(dict.fromkeys(timeline.lanes))}
        for r in range(timeline.ranks):
            events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"{title} rank {rank}"}})
            for lane, tid in lanes.items():
                events.append({"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": lane}})
            for i, ref in enumerate(timeline.refs):
                begin, end = float(timeline.start[i, r]), float(timeline.end[i, r])
                skew = float(timeline.ready[i, r]) - begin
                event: dict[str, Any] = {
                    "ph": "X",
                    "pid": rank,
                    "tid": lanes[timeline.lanes[i]],
                    "name": str(ref),
                    "cat": STAGES[ref.stage].category,
                    "ts": (begin - origin) * 1e6,
                    "dur": (end - begin) * 1e6,
                    "args": {"stage": STAGES[ref.stage].title, "batch": ref.batch, "skew_us": skew * 1e6},
                }
                if ref.micro:
                    event["args"]["micro_batch"] = ref.micro
                events.append(event)
            rank += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def spans_of_perfetto(text: str) -> list[list[Span]]:
    """The spans of each rank in a trace that ``perfetto_json`` wrote, in nanoseconds from the beginning of the trace.

    Raises ValueError for any other text.
    """
    try:
        events = json.loads(text)["traceEvents"]
        lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        ranks: dict[int, list[Span]] = {}
        for event in events:
            if event["ph"] == "X":
                ref = parse_ref(event["name"])
                end = round((event["ts"] + event["dur"]) * 1e3)
                span = Span(*ref, lanes[event["pid"], event["tid"]], round(event["ts"] * 1e3), end)
                ranks.setdefault(event["pid"], []).append(span)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"it is not a trace of 'nestpipe run --trace' ({type(error).__name__}: {error})") from None
    return [ranks[rank] for rank in sorted(ranks)]


def perfetto_json(timelines: Sequence[Timeline], title: str) -> str:
    return json_text(perfetto(timelines, title), separators=(",", ":"))
