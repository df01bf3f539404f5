"""Runs a part of the plan and stores its records. Finished runs are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nestpipe.drawing.steady_step import cut_out
from nestpipe.machine.files import write_atomically
from nestpipe.machine.json_files import json_text
from nestpipe.measurement.record import Record, Store
from nestpipe.simulator.scenario import SimulateConfig, simulate
from nestpipe.testbed.testbed import TestbedUnavailable
from nestpipe.training.convergence import ConvergenceConfig, Curve, converge, curve_config, read_curves
from nestpipe.training.runs import MethodRun, RunConfig, run
from results.experiments.plan import Part, has_record

#: (what is running, done, total)
Progress = Callable[[str, int, int], None]
#: (method, steps done, steps in total, loss)
StepProgress = Callable[[str, int, int, float], None]
#: Number of steps in a stored timeline.
_STEPS_KEPT = 2


@dataclass(frozen=True)
class Runner:
    """The functions that carry out the plan. Tests pass their own."""

    measure: Callable[[RunConfig, StepProgress | None], Sequence[MethodRun]] = run
    simulate: Callable[[SimulateConfig], list[Record]] = simulate


RUNNER = Runner()


@dataclass(frozen=True)
class Done:
    """``records``: those of a part, including the ones already in its store. ``seconds``: how long the others took.
    ``measured``: how many of the others ran on real processes. ``notes``: what was done differently from the plan."""

    records: tuple[Record, ...]
    seconds: float
    measured: int = 0
    notes: tuple[str, ...] = ()


def run_part(
    part: Part, folder: Path, progress: Progress | None = None, again: bool = False, runner: Runner = RUNNER
) -> Done:
    """Measures or simulates ``part`` into ``folder``/records/NAME. ``again``: repeats finished runs too.

    An interrupted part resumes with the run that was in progress. If shaped hosts are not available, runs fall back
    to loopback, and a note says so. Raises what ``runner`` raises.
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
    """Trains convergence curves into ``folder``/convergence. Returns how many were trained."""
    target = folder / "convergence"
    if again:
        setting = Curve("", 0, curve_config(config), (), (), {}).setting
        for path in target.glob(f"*-{setting}.json"):
            path.unlink()
    before = {(c.method, c.seed) for c in read_curves(target) if c.config == curve_config(config)}
    made = converge(config, target, progress)
    return sum((curve.method, curve.seed) not in before for curve in made)


def _step_progress(progress: Progress | None, title: str, names: Sequence[str]) -> StepProgress | None:
    """``progress`` in the form that a run of the methods ``names`` can call."""
    if progress is None:
        return None

    def tell(name: str, done: int, total: int, loss: float) -> None:
        progress(f"{title} {name}", done + total * names.index(name), total * len(names))

    return tell


def _simulated(config: SimulateConfig, store: Store, runner: Runner) -> list[Record]:
    """Simulates again, whatever the store has: this takes less time than comparing would save."""
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
    """Writes two typical steps of rank 0 as JSON: lists of stage, batch, micro-batch, lane, start and end in ms."""
    record = run.record
    if len(record.steps) < _STEPS_KEPT:
        return
    last = _usual_step(record)
    steps = cut_out(run.timelines[0], last - _STEPS_KEPT + 1, last)
    if steps is None:
        return
    kept = [
        [span.stage, span.batch, span.micro, span.lane, round(span.start * 1e3, 4), round(span.end * 1e3, 4)]
        for span in steps.spans
    ]
    data = {"record": record.key, "method": record.method, "length_ms": steps.length * 1e3, "spans": kept}
    write_atomically(folder / f"{record.key}.json", json_text(data) + "\n")


def _usual_step(record: Record) -> int:
    """The reported step that, with the one before it, is nearest to the median. A single step may be an outlier."""
    took = dict(zip(record.steps, record.metrics["step_ms"], strict=True))
    typical = 2 * record.median["step_ms"]
    pairs = {step: ms + took[step - 1] for step, ms in took.items() if step - 1 in took}
    return min(pairs, key=lambda step: (abs(pairs[step] - typical), step)) if pairs else record.steps[-1]
