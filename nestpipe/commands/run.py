"""``nestpipe run``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from nestpipe.config import WARM_UP_STEPS, RunConfig
from nestpipe.machine.files import require_writable, require_writable_folder, slug, write_atomically
from nestpipe.machine.json_files import json_text
from nestpipe.machine.progress import progress_side_by_side
from nestpipe.measurement.record import Record, Store
from nestpipe.measurement.trace import perfetto_json
from nestpipe.methods import methods_of
from nestpipe.testbed.switch import TestbedUnavailable
from nestpipe.training.measured_record import MethodRun
from nestpipe.training.runs import run


@dataclass(frozen=True)
class RunCommand:
    """Train one or several methods on the same model, data and seed, on real rank processes, in interleaved
    rounds, and print what was hidden behind what."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    json: Path | None = None
    """Write {"methods": {name: record}} to this file."""
    trace: Path | None = None
    """Write a Perfetto trace per method into this folder (open in ui.perfetto.dev)."""
    store: Path | None = None
    """Add the records to the record store in this folder."""


def main(arguments: Sequence[str]) -> int:
    command = tyro.cli(RunCommand, prog="nestpipe run", args=arguments, config=(tyro.conf.OmitArgPrefixes,))
    console = Console(stderr=True)
    methods_of(command.run)
    if command.json:  # before anything is trained
        require_writable(command.json)
    for folder in filter(None, (command.store, command.trace)):
        require_writable_folder(folder)
    runs = _run_with_progress(command.run, console)
    try:
        out = Console()
        out.print(_table([r.record for r in runs]))
        for line in _remarks([r.record for r in runs]):
            out.print(line, highlight=False)
        sys.stdout.flush()
    finally:  # a full disk or a closed pipe behind stdout must not lose the files too
        _write(command, runs)
    return 0


def _write(command: RunCommand, runs: Sequence[MethodRun]) -> None:
    """Write all files that were asked for. If one cannot be written, the others still are. Raises the first error."""
    errors = []
    writes: list[Callable[[], object]] = []
    if path := command.json:
        records = {r.record.method: r.record.to_json() for r in runs}
        text = json_text({"methods": records}, indent=1, default=str) + "\n"
        writes.append(lambda: write_atomically(path, text))
    if command.store:
        writes += [partial(Store(command.store).write, r.record) for r in runs]
    if command.trace:
        for r in runs:
            file = command.trace / f"{slug(r.record.method)}.perfetto.json"
            writes.append(partial(write_atomically, file, perfetto_json(r.timelines, r.record.method)))
    for write in writes:
        try:
            write()
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _run_with_progress(config: RunConfig, console: Console) -> list[MethodRun]:
    with progress_side_by_side(console, config.method_names, "starting ranks") as bars:

        def show(name: str, done: int, total: int, loss: float) -> None:
            bars(name, done, total, f"rank 0 loss {loss:.3f}")

        try:
            return run(config, show)
        except TestbedUnavailable as error:
            console.print(
                f"[yellow]{error}[/yellow]\nRunning on loopback instead: links are not shaped.", highlight=False
            )
            return run(dataclasses.replace(config, testbed="loopback"), show)


#: Rows of the table: heading, metric, format.
ROWS = (
    ("step", "step_ms", "{:.1f}"),
    ("samples/s", "qps", "{:.0f}"),
    ("dense", "dense_ms", "{:.2f}"),
    ("update", "update_ms", "{:.2f}"),
    ("exposed input", "exposed_input_ms", "{:.2f}"),
    ("exposed lookup", "exposed_lookup_ms", "{:.2f}"),
    ("exposed communication", "exposed_communication_ms", "{:.2f}"),
    ("exposed dense sync", "exposed_dense_sync_ms", "{:.2f}"),
    ("skew", "skew_ms", "{:.2f}"),
    ("other", "other_ms", "{:.2f}"),
    ("lookup, hidden or not", "lookup_ms", "{:.2f}"),
    ("communication, hidden or not", "communication_ms", "{:.2f}"),
    ("exposed communication ratio", "exposed_communication_ratio", "{:.1%}"),
    ("exposed vs. serial's", "exposed_vs_serial", "{:.1%}"),
    ("utilisation", "utilisation", "{:.0%}"),
    ("embedding MB per step", "embedding_bytes", "{:.2f}"),
    ("of the minimum", "minimum_embedding_bytes", "{:.2f}x"),
    ("replica MB per step", "replica_bytes", "{:.2f}"),
)


def _table(records: Sequence[Record]) -> Table:
    first = records[0]
    title = f"measured: {first.workers} ranks, {first.testbed}" + (", dense PACED" if first.paced else "")
    caption = f"{_what(first)}\nmedians over steps, means over ranks; ms per step unless stated"
    table = Table(title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for record in records:
        table.add_column(record.method, justify="right")
    medians = [record.median for record in records]
    for heading, name, form in ROWS:
        cells = [_cell(record, median, name, form) for record, median in zip(records, medians, strict=True)]
        if any(cells):
            table.add_row(heading, *cells)
        if name == "step_ms" and first.steps:
            ratios = [f"{record.speedup_over(first):.2f}x" if record.steps else "" for record in records]
            table.add_row(f"speed-up over {first.method}", *ratios)
    table.add_row("loss, last step", *(f"{record.losses[-1]:.6f}" for record in records))
    return table


def _cell(record: Record, median: Mapping[str, float], name: str, form: str) -> str:
    if name not in median:
        return ""
    if name == "step_ms":
        low, high = np.percentile(record.metrics[name], [25, 75])
        return f"{median[name]:.1f} ± {(high - low) / 2:.1f}"
    if name == "replica_bytes" and not median[name]:
        return ""
    if name in ("embedding_bytes", "replica_bytes"):
        return form.format(median[name] / 1e6)
    if name == "minimum_embedding_bytes":
        return form.format(median["embedding_bytes"] / median[name]) if median[name] else ""
    return form.format(median[name])


def _what(record: Record) -> str:
    """One line on what was trained."""
    data, model = record.config["data"], record.config["model"]
    return (
        f"{data['dataset']} data, batch {data['batch_size']} per rank; {model['backbone']}, "
        f"dim {model['embedding_dim']}, {model['dense_layers']} layers, length {model['sequence_length']}"
    )


def _remarks(records: Sequence[Record]) -> list[str]:
    first = records[0]
    if first.steps:
        lines = [
            f"±: half the interquartile range over {len(first.steps)} steps. Exposed: on the critical path of the step."
        ]
    else:
        lines = [f"No step was timed: the first {WARM_UP_STEPS} steps of a round, and after --resume, are warm-up."]
    most = max(int(r.config["micro_batches"]) for r in records)
    if most > 1 and first.testbed == "loopback" and not first.paced:
        lines.append(
            "On loopback without --pace-dense, moving data takes time from the cores that compute, so little can "
            "overlap. --testbed gives links that take time, and --pace-dense gives a stand-in for an accelerator."
        )
    if most > first.config["data"]["batch_size"]:
        lines.append(
            f"{most} micro-batches are more than a batch of {first.config['data']['batch_size']} fills: some are empty."
        )
    if len(records) > 1:
        with np.errstate(invalid="ignore"):  # losses that are not finite
            gap = max(float(np.max(np.abs(np.subtract(r.losses, first.losses)))) for r in records[1:])
        lines.append(
            f"largest difference in a step's loss from {first.method}, over {len(first.losses)} steps: {gap:.2g}"
        )
    lines += dict.fromkeys(note for record in records for note in record.notes)
    for record in records:
        if record.evaluation:
            lines.append(f"{record.method}: " + "  ".join(f"{k} {v:.4f}" for k, v in record.evaluation.items()))
        if record.paper_method and record.paper_method != record.method:
            lines.append(f"{record.method} is what the paper's numbers call {record.paper_method}.")
    return lines
