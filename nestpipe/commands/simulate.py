"""``nestpipe simulate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.table import Table

from nestpipe.commands.terminal import short_count, short_ms, wide_console
from nestpipe.machine.files import write_atomically
from nestpipe.machine.json_files import json_text
from nestpipe.measurement.record import Record, Store
from nestpipe.methods import find_method, known_methods
from nestpipe.simulator.scenario import SimulateConfig, scaling, simulate


@dataclass(frozen=True)
class SimulateCommand:
    """Predict step times: schedules on virtual clocks, with a cost model. Nothing is run."""

    scenario: Annotated[SimulateConfig, tyro.conf.arg(name="")] = field(default_factory=SimulateConfig)
    json: Path | None = None
    """Write {"records": [record]} to this file."""
    store: Path | None = None
    """Add the records to the record store in this folder."""


def main(arguments: Sequence[str]) -> int:
    command = tyro.cli(SimulateCommand, prog="nestpipe simulate", args=arguments)
    records = simulate(command.scenario)
    out = wide_console()
    out.print(table(records))
    names = dict.fromkeys(record.method for record in records)
    for method in (find_method(name) for name in names if name in known_methods()):
        if method.remark and method.base not in names:
            print(f"- {method.remark}")
    for note in records[0].notes:
        out.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
    if command.json:
        text = json_text({"records": [r.to_json() for r in records]}, indent=1, default=str)
        write_atomically(command.json, text + "\n")
    if command.store:
        for record in records:
            Store(command.store).write(record)
    return 0


def table(records: Sequence[Record]) -> Table:
    """One row per number of workers and method."""
    first = records[0]
    result = Table(
        title=f"SIMULATED: {first.config['hardware']} (from: {first.config['hardware_origin']})",
        caption="Milliseconds per step on virtual clocks, n workers. x: speed-up over the first method.\n"
        "scal.: samples/s per worker relative to the smallest n. lookup, comm.: exposed parts;\n"
        "rest: update, dense sync, skew. use: dense / step.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    heads = ("n", "method", "step", "x", "samples/s", "scal.", "dense", "lookup", "comm.", "rest", "use")
    for head in heads:
        result.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    for i, record in enumerate(records):
        base = next(r for r in records if r.workers == record.workers)
        step = record.typical("step_ms")
        n = record.config["micro_batches"]
        shown = [record.typical(f"{name}_ms") for name in ("dense", "exposed_lookup", "exposed_communication")]
        result.add_row(
            str(record.workers),
            record.method + (f"({n})" if n > 1 else ""),
            short_ms(step),
            f"{record.speedup_over(base):.2f}",
            short_count(record.typical("qps")),
            f"{scaling(records, record):.0%}",
            *map(short_ms, shown),
            short_ms(abs(step - sum(shown))),
            f"{record.typical('utilisation'):.0%}",
            end_section=i + 1 < len(records) and records[i + 1].workers != record.workers,
        )
    return result
