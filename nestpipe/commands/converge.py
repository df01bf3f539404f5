"""``nestpipe converge``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nestpipe.convergence import ConvergenceConfig, converge
from nestpipe.records import require_writable


@dataclass(frozen=True)
class ConvergeCommand(ConvergenceConfig):
    """Train methods over the same data with several seeds, and write their loss and HR/NDCG curves for Fig. 6.
    Finished runs are kept: interrupt it and start it again as often as you like."""

    folder: Path = Path("results/out")
    """Curves go to its subfolder convergence; `nestpipe report --only fig6` draws them."""


def main(arguments: Sequence[str]) -> int:
    command = tyro.cli(ConvergeCommand, prog="nestpipe converge", args=arguments, config=(tyro.conf.OmitArgPrefixes,))
    config = ConvergenceConfig(**{f.name: getattr(command, f.name) for f in dataclasses.fields(ConvergenceConfig)})
    folder = command.folder / "convergence"
    require_writable(folder / "any")
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting ranks", total=None)
        curves = converge(
            config, folder, lambda title, done, total: bars.update(task, description=title, completed=done, total=total)
        )
    print(f"{len(curves)} curves in {folder}; now: nestpipe report --only fig6 --folder {command.folder}")
    return 0
