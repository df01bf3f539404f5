"""``nestpipe reproduce``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro
from rich.console import Console

from nestpipe.config import RunConfig
from nestpipe.machine.files import require_writable_folder, write_atomically
from nestpipe.machine.json_files import json_text
from nestpipe.machine.progress import progress_of_stages
from nestpipe.methods import methods_of

if TYPE_CHECKING:
    from results.experiments.plan import Part
    from results.experiments.run_part import Runner


@dataclass(frozen=True)
class ReproduceCommand:
    """Simulate and measure all that the tables and figures need, then write the report. Finished runs are kept, so you
    can interrupt it and start it again as often as you like."""

    only: str | None = None
    """Comma-separated parts, tables or figures, such as table2,micro-batches (default: all)."""
    folder: Path = Path("results/out")
    """Where records, timelines and outputs go."""
    size: Literal["full", "tiny"] = "full"
    """full, or tiny: the same runs on very small models, in two or three minutes, to see that everything runs."""
    workers: int = 2
    """Ranks of the small runs; the large runs have twice as many."""
    testbed: str = "netns:200mbit,1ms"
    """netns:RATE,DELAY (needs root; without it, loopback is used and a note says so) or loopback."""
    hardware: str = "npu-1536-industrial"
    """Hardware profile of the simulated tables."""
    rounds: int = 3
    """Interleaved rounds of the measured runs."""
    seed: int = 1
    """Seed of the data, the weights and the noise."""
    again: bool = False
    """Also measure again what has been measured already."""


def main(arguments: Sequence[str]) -> int:
    return reproduce(tyro.cli(ReproduceCommand, prog="nestpipe reproduce", args=arguments))


def reproduce(command: ReproduceCommand, runner: Runner | None = None) -> int:
    """Run the parts that are asked for, then write the report; the exit status. ``runner``: what runs them, if not
    ``nestpipe run`` and ``simulate``. Raises ValueError for options that cannot be used."""
    from nestpipe.commands.report import main as report

    parts = _parts(command)
    for run in (run for part in parts for run in part.runs if isinstance(run, RunConfig)):
        methods_of(run)  # reports what cannot run before anything is run
    require_writable_folder(command.folder)
    console = Console(stderr=True)
    began = time.monotonic()
    for i, part in enumerate(parts):
        _run(part, f"{i + 1}/{len(parts)}", command, console, runner)
    status = report(["--folder", str(command.folder)])
    console.print(f"all parts in {time.monotonic() - began:.0f} s", highlight=False)
    return status


def _parts(command: ReproduceCommand) -> list[Part]:
    """The parts of the plan that are asked for. Raises ValueError."""
    from results.experiments.plan import Options, all_parts

    if min(command.workers, command.rounds) < 1:
        raise ValueError("--workers and --rounds must be at least 1")
    shared = ("size", "workers", "testbed", "hardware", "rounds", "seed")
    parts = all_parts(Options(**{name: getattr(command, name) for name in shared}))
    if not command.only:
        return parts
    wanted = {name.strip() for name in command.only.split(",")}
    known = {part.name for part in parts} | {name for part in parts for name in part.feeds}
    if unknown := sorted(wanted - known):
        raise ValueError(f"no part, table or figure '{unknown[0]}': choose one of {', '.join(sorted(known))}")
    return [part for part in parts if part.name in wanted or wanted & set(part.feeds)]


def _run(part: Part, place: str, command: ReproduceCommand, console: Console, runner: Runner | None) -> None:
    from results.experiments.run_part import RUNNER, run_part

    with progress_of_stages(console, part.name) as show:
        done = run_part(part, command.folder, show, command.again, runner or RUNNER)
    kept = " (kept from before)" if part.kind == "measured" and not done.measured else ""
    console.print(
        f"{place} {part.name}: {len(done.records) or done.measured} records, {done.seconds:.0f} s{kept}",
        highlight=False,
    )
    for note in dict.fromkeys(done.notes):
        console.print(f"    {note}", highlight=False)
    if not kept:
        _note_time(command.folder, part.name, done.seconds)


def _note_time(folder: Path, part: str, seconds: float) -> None:
    from results.report.report import read_times

    times = read_times(folder) | {part: round(seconds, 1)}
    write_atomically(folder / "times.json", json_text(times, indent=1, sort_keys=True) + "\n")
