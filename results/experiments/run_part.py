"""Runs a part of the plan into its store; what is there already is kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baselines.simulated import METHODS
from nestpipe.machine.files import write_atomically
from nestpipe.measurement.record import Record, Store
from nestpipe.measurement.trace import Timeline
from nestpipe.simulator.scenario import SimulateConfig, simulate
from nestpipe.testbed.testbed import TestbedUnavailable
from nestpipe.training.convergence import ConvergenceConfig, Curve, converge, identity, read_curves
from nestpipe.training.runs import MethodRun, RunConfig, run
from results.experiments.plan import Part, has_record

#: (what is running, done, total)
Progress = Callable[[str, int, int], None]
#: (method, steps done, of, loss)
StepProgress = Callable[[str, int, int, float], None]
#: Steps that a stored timeline shows.
_STEPS_KEPT = 2


def simulate_known(config: SimulateConfig) -> list[Record]:
    """``simulate`` with the methods of the paper and the baselines."""
    return simulate(config, METHODS)


@dataclass(frozen=True)
class Runner:
    """What carries out the plan; a test has its own."""

    measure: Callable[[RunConfig, StepProgress | None], Sequence[MethodRun]] = run
    simulate: Callable[[SimulateConfig], list[Record]] = simulate_known


RUNNER = Runner()


@dataclass(frozen=True)
class Done:
    """``records`` of a part, those found included; ``seconds`` that the others took, ``measured`` of them on real
    processes; ``notes``: what was done differently from the plan."""

    records: tuple[Record, ...]
    seconds: float
    measured: int = 0
    notes: tuple[str, ...] = ()


def run_part(
    part: Part, folder: Path, progress: Progress | None = None, again: bool = False, runner: Runner = RUNNER
) -> Done:
    """Measure or simulate ``part`` into ``folder``/records/NAME. ``again``: also what the store has already.

    An interrupted part continues with the run that it was in. If hosts cannot be shaped, runs fall back to loopback,
    and a note says so. Raises what ``runner`` raises.
    """
    store = Store(folder / "records" / part.name)
    store.folder.mkdir(parents=True, exist_ok=True)
    found = [] if again else store.read()[0]
    began, records, notes = time.monotonic(), list[Record](), list[str]()
    loopback, curves = False, 0
    for i, config in enumerate(part.runs):
        title = f"{part.name} {i + 1}/{len(part.runs)}"
        if isinstance(config, SimulateConfig):
            records += _simulated(config, store, runner)
            if progress:
                progress(title, i + 1, len(part.runs))
            continue
        if isinstance(config, ConvergenceConfig):
            curves += _curves(config, folder, again, progress)
            continue
        if loopback and config.testbed != "loopback":
            config = replace(config, testbed="loopback")
        tell = _step_progress(progress, title, config.method_names)
        try:
            records += _measured(config, part, store, found, folder, runner, tell)
        except TestbedUnavailable as error:
            loopback = True
            notes.append(f"{error}; measured on loopback instead: links are not shaped")
            config = replace(config, testbed="loopback")
            records += _measured(config, part, store, found, folder, runner, tell)
    before = {r.key for r in found}
    fresh = sum(r.kind == "measured" and (again or r.key not in before) for r in records)
    return Done(tuple(records), time.monotonic() - began, fresh + curves, tuple(notes))


def _curves(config: ConvergenceConfig, folder: Path, again: bool, progress: Progress | None) -> int:
    """Convergence curves into ``folder``/convergence; how many were trained."""
    target = folder / "convergence"
    if again:
        setting = Curve("", 0, identity(config), (), (), {}).setting
        for path in target.glob(f"*-{setting}.json"):
            path.unlink()
    before = {(c.method, c.seed) for c in read_curves(target) if c.config == identity(config)}
    made = converge(config, target, progress)
    return sum((curve.method, curve.seed) not in before for curve in made)


def _step_progress(progress: Progress | None, title: str, names: Sequence[str]) -> StepProgress | None:
    """``progress`` as a run of the methods ``names`` calls it."""
    if progress is None:
        return None

    def tell(name: str, done: int, total: int, loss: float) -> None:
        progress(f"{title} {name}", done + total * names.index(name), total * len(names))

    return tell


def _simulated(config: SimulateConfig, store: Store, runner: Runner) -> list[Record]:
    """Simulated again whatever the store has: it takes less time than comparing would save."""
    records = runner.simulate(config)
    for record in records:
        store.write(record)
    return records


def _measured(
    config: RunConfig,
    part: Part,
    store: Store,
    found: Sequence[Record],
    folder: Path,
    runner: Runner,
    tell: StepProgress | None,
) -> list[Record]:
    names = config.method_names
    if all(has_record(found, config, name) for name in names):
        return [r for r in found if r.method in names and has_record([r], config, r.method)]
    runs = runner.measure(config, tell)
    for method in runs:
        store.write(method.record)
        write_timeline(method, folder / "timelines" / part.name)
    return [method.record for method in runs]


def write_timeline(run: MethodRun, folder: Path) -> None:
    """Two usual steps of rank 0 as JSON: lists of stage, batch, micro-batch, lane, start and end in ms."""
    record = run.record
    if len(record.steps) < _STEPS_KEPT:
        return
    last = _usual_step(record)
    spans = list(_spans(run.timelines[0]))
    compute = [(batch, end) for _, batch, _, lane, _, end in spans if lane == "compute"]
    ends = {batch: max(e for b, e in compute if b == batch) for batch in {b for b, _ in compute}}
    low, high = ends.get(last - _STEPS_KEPT), ends.get(last)
    if low is None or high is None:
        return
    kept = [
        [stage, batch - last + 1, micro, lane, round((start - low) * 1e3, 4), round((end - low) * 1e3, 4)]
        for stage, batch, micro, lane, start, end in spans
        if end > low and start < high
    ]
    data = {"record": record.key, "method": record.method, "length_ms": (high - low) * 1e3, "spans": kept}
    write_atomically(folder / f"{record.key}.json", json.dumps(data) + "\n")


def _usual_step(record: Record) -> int:
    """The reported step that, with the one before it, is nearest to the median: a single step may be an outlier."""
    took = dict(zip(record.steps, record.metrics["step_ms"], strict=True))
    typical = 2 * record.median["step_ms"]
    pairs = {step: ms + took[step - 1] for step, ms in took.items() if step - 1 in took}
    return min(pairs, key=lambda step: (abs(pairs[step] - typical), step)) if pairs else record.steps[-1]


def _spans(timeline: Timeline) -> Any:
    for i, ref in enumerate(timeline.refs):
        yield ref.stage, ref.batch, ref.micro, timeline.lanes[i], float(timeline.start[i, 0]), float(timeline.end[i, 0])
