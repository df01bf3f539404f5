"""``nestpipe converge``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from nestpipe.machine.files import require_writable
from nestpipe.machine.progress import progress_of_stages
from nestpipe.training.convergence import ConvergenceConfig, converge


@dataclass(frozen=True)
class ConvergeCommand:
    """Train methods over the same data with several seeds, and write their loss and HR/NDCG curves for Fig. 6.
    Finished runs are kept, so you can interrupt it and start it again as often as you like."""

    curves: Annotated[ConvergenceConfig, tyro.conf.arg(name="")] = field(default_factory=ConvergenceConfig)
    folder: Path = Path("results/out")
    """Curves go to its subfolder convergence; `nestpipe report --only fig6` draws them."""


def main(arguments: Sequence[str]) -> int:
    command = tyro.cli(ConvergeCommand, prog="nestpipe converge", args=arguments, config=(tyro.conf.OmitArgPrefixes,))
    folder = command.folder / "convergence"
    require_writable(folder / "any")
    with progress_of_stages(Console(stderr=True), "starting ranks") as show:
        curves = converge(command.curves, folder, show)
    for sentence in filter(None, (curve.diverged for curve in curves)):
        print(sentence)
    print(f"{len(curves)} curves in {folder}; now: nestpipe report --only fig6 --folder {command.folder}")
    return 0
