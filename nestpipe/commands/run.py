"""``nestpipe run``."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nestpipe.records import Record, Store, write_atomically
from nestpipe.run import MethodRun, RunConfig, run, validate
from nestpipe.testbed import TestbedUnavailable
from nestpipe.trace import perfetto_json


@dataclass(frozen=True)
class RunCommand(RunConfig):
    """Train one or several methods on the same model, data and seed, on real rank processes, in interleaved
    rounds, and print what was hidden behind what."""

    json: Path | None = None
    """Write {"methods": {name: record}} to this file."""
    trace: Path | None = None
    """Write a Perfetto trace per method into this folder (open in ui.perfetto.dev)."""
    store: Path | None = None
    """Add the records to the record store in this folder."""


def main(arguments: Sequence[str]) -> int:
    command = tyro.cli(RunCommand, prog="nestpipe run", args=arguments)
    console = Console(stderr=True)
    config = RunConfig(**{f.name: getattr(command, f.name) for f in dataclasses.fields(RunConfig)})
    validate(config)
    runs = _run_with_progress(config, console)
    out = Console()
    out.print(_table([r.record for r in runs]))
    for line in _remarks([r.record for r in runs]):
        out.print(line, highlight=False)
    if command.json:
        records = {r.record.method: r.record.to_json() for r in runs}
        write_atomically(command.json, json.dumps({"methods": records}, indent=1, default=str) + "\n")
    if command.store:
        for r in runs:
            Store(command.store).write(r.record)
    if command.trace:
        for r in runs:
            name = "".join(c if c.isalnum() else "-" for c in r.record.method).strip("-")
            write_atomically(command.trace / f"{name}.perfetto.json", perfetto_json(r.timelines, r.record.method))
    sys.stdout.flush()
    return 0


def _run_with_progress(config: RunConfig, console: Console) -> list[MethodRun]:
    columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console, transient=True) as bars:
        tasks = {name: bars.add_task(name, total=None, loss="starting ranks") for name in config.method_names}

        def show(name: str, done: int, total: int, loss: float) -> None:
            bars.update(tasks[name], completed=done, total=total, loss=f"rank 0 loss {loss:.3f}")

        try:
            return run(config, show)
        except TestbedUnavailable as error:
            console.print(f"[yellow]{error}[/yellow]\nRunning on loopback instead: links are not shaped.", highlight=False)
            return run(dataclasses.replace(config, testbed="loopback"), show)


def _table(records: Sequence[Record]) -> Table:
    first = records[0]
    title = f"measured on {first.workers} rank(s), {first.testbed}" + (", dense PACED" if first.paced else "")
    table = Table(title=title, caption="median over steps; ms unless said; exposed: on the critical path of the step")
    table.add_column("method")
    columns = {
        "step": "step_ms",
        "dense": "dense_ms",
        "update": "update_ms",
        "exposed\nlookup": "exposed_lookup_ms",
        "exposed\ncomm.": "exposed_communication_ms",
        "of\ncomm.": "communication_ms",
        "exposed\nratio": "exposed_communication_ratio",
        "dense\nsync": "exposed_dense_sync_ms",
        "input": "exposed_input_ms",
        "skew": "skew_ms",
        "other": "other_ms",
    }
    for heading in ("speed-up", "samples/s", *columns, "utilisation", "final loss"):
        table.add_column(heading, justify="right")
    base = np.asarray(first.metrics["step_ms"])
    for record in records:
        median = record.median
        if not median:
            table.add_row(record.method, *["no whole step"] + [""] * (len(columns) + 3))
            continue
        cells = [f"{median[name]:.2f}" for name in columns.values()]
        spread = np.subtract(*np.percentile(record.metrics["step_ms"], [75, 25]))
        cells[0] = f"{median['step_ms']:.1f} ± {spread / 2:.1f}"
        speedup = float(np.median(base)) / median["step_ms"]
        loss = f"{record.losses[-1]:.6f}"
        table.add_row(
            record.method, f"{speedup:.2f}x", f"{median['qps']:.0f}", *cells, f"{median['utilisation']:.0%}", loss
        )
    return table


def _remarks(records: Sequence[Record]) -> list[str]:
    first = records[0]
    lines = [f"speed-up: against {first.method}; ±: half the interquartile range over {len(first.steps)} steps."]
    if len(records) > 1:
        gap = max(float(np.max(np.abs(np.subtract(r.losses, first.losses)))) for r in records[1:])
        lines.append(f"largest difference of a step's loss from {first.method}, over {len(first.losses)} steps: {gap:.2g}")
    for record in records:
        if record.evaluation:
            lines.append(f"{record.method}: " + "  ".join(f"{k} {v:.4f}" for k, v in record.evaluation.items()))
        if record.paper_method and record.paper_method != record.method:
            lines.append(f"{record.method} is what the paper's numbers call {record.paper_method}.")
    traffic = first.median
    if traffic.get("embedding_bytes"):
        share = traffic["embedding_bytes"] / max(1.0, traffic["minimum_embedding_bytes"])
        lines.append(f"embedding traffic of {first.method}: {traffic['embedding_bytes'] / 1e6:.2f} MB a step, {share:.2f}x the minimum.")
    return lines
