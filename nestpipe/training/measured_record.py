"""Makes a record of what the ranks of a run saw of a method: timelines, the account of time, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nestpipe.config import WARM_UP_STEPS, RunConfig
from nestpipe.measurement.exposed_time import StepTimes, joined, step_times
from nestpipe.measurement.provenance import provenance
from nestpipe.measurement.record import METRICS, Record, diverged, metrics_from_times
from nestpipe.measurement.trace import Timeline, observed_timelines, scheduled_timeline
from nestpipe.methods import Method, find_method
from nestpipe.training.loop import RankResult


@dataclass(frozen=True)
class MethodRun:
    """One method's run on all ranks: its record and the timelines behind it (which together cover all ranks)."""

    record: Record
    timelines: list[Timeline]


def method_runs(
    config: RunConfig, methods: Sequence[Method], ranks: Sequence[dict[str, RankResult]], notes: Sequence[str]
) -> list[MethodRun]:
    """One run for each of ``methods``. ``ranks``: per rank, the results by method. ``notes`` go into every record."""
    baseline = _serial_exposed_ms(config, ranks)
    return [_method_run(config, method, [rank[method.name] for rank in ranks], baseline, notes) for method in methods]


def account(method: Method, micro_batches: int, ranks: Sequence[RankResult]) -> tuple[StepTimes, list[Timeline]]:
    """Timelines of all ranks and the account of their time."""
    spans = [rank.spans for rank in ranks]
    offsets = [rank.clock_offset for rank in ranks]
    groups = method.options.replica_groups if method.replicated else 1
    if method.observed:
        timelines = observed_timelines(spans, offsets, groups)
        return joined([step_times(timeline) for timeline in timelines]), timelines
    schedule = method.schedule(micro_batches)
    timeline = scheduled_timeline(schedule.unroll(_end(ranks) + schedule.depth), spans, offsets, groups)
    return step_times(timeline), [timeline]


def _end(ranks: Sequence[RankResult]) -> int:
    """One past the last step."""
    return ranks[0].results[-1].step + 1


def _reported(config: RunConfig, times: StepTimes, ranks: Sequence[RankResult]) -> list[int]:
    """The accounted steps of the run, without the warm-up of each round and the warm-up after a resumption."""
    total, resumed = _end(ranks), ranks[0].resumed
    warm_up = set[int]()
    if resumed is not None:
        warm_up.update(range(resumed, resumed + WARM_UP_STEPS))
    first = 0
    for steps in config.steps_of_rounds(total):
        warm_up.update(range(first, first + WARM_UP_STEPS))
        first += steps
    return [step for step in times.steps if step not in warm_up and (resumed or 0) <= step < total]


def _serial_exposed_ms(config: RunConfig, ranks: Sequence[dict[str, RankResult]]) -> float | None:
    """Median exposed communication (ms) of ``serial`` in this session, None if it did not run."""
    if "serial" not in ranks[0]:
        return None
    serial = [rank["serial"] for rank in ranks]
    times, _ = account(find_method("serial"), 1, serial)
    keep = [times.steps.index(step) for step in _reported(config, times, serial)]
    return float(np.median(times.mean("exposed_communication")[keep])) if keep else None


def _method_run(
    config: RunConfig,
    method: Method,
    ranks: Sequence[RankResult],
    serial_exposed_ms: float | None,
    notes: Sequence[str],
) -> MethodRun:
    micro_batches = method.micro_batches_of(config.micro_batches)
    times, timelines = account(method, micro_batches, ranks)
    keep = _reported(config, times, ranks)
    by_step = {step[0].step: step for step in zip(*(rank.results for rank in ranks), strict=True)}
    notes = [*notes, *ranks[0].notes]
    if min(by_step) > 0:
        first = min(by_step)
        notes = [*notes, f"{method.name} resumed with another number of ranks: its losses begin with step {first}"]
    metrics = metrics_from_times(times, keep, {s: float(sum(r.samples for r in by_step[s])) for s in keep})
    for name in ("embedding_bytes", "minimum_embedding_bytes", "replica_bytes"):
        metrics[name] = [float(sum(getattr(r, name) for r in by_step[s])) for s in keep]
    metrics["duplication_factor"] = [float(np.mean([r.duplication_factor for r in by_step[s]])) for s in keep]
    if serial_exposed_ms:
        metrics["exposed_vs_serial"] = [x / serial_exposed_ms for x in metrics["exposed_communication_ms"]]
    else:
        metrics["exposed_vs_serial"] = []
    losses = [float(sum(r.loss for r in step)) for step in by_step.values()]
    if sentence := diverged(method.name, losses):
        notes = [*notes, sentence]
    record = Record(
        kind="measured",
        method=method.name,
        paper_method=method.paper_method,
        workers=config.workers,
        seed=config.seed,
        config=config.in_record(micro_batches),
        steps=keep,
        metrics={name: metrics[name] for name in METRICS},
        losses=losses,
        paced=config.pace_dense > 0,
        testbed=config.testbed,
        evaluation=ranks[0].evaluation,
        notes=notes,
        provenance=provenance(),
    )
    return MethodRun(record, timelines)
