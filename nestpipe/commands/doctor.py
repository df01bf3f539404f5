"""``nestpipe doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nestpipe.machine.doctor import Check, diagnose, exit_code

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Doctor:
    """Check versions, devices, gloo/NCCL, iproute2 and Slurm, and say how to fix what is missing."""


def main(arguments: Sequence[str]) -> int:
    tyro.cli(Doctor, prog="nestpipe doctor", args=arguments)
    checks = diagnose()
    Console().print(as_table(checks))
    return exit_code(checks)


def as_table(checks: Sequence[Check]) -> Table:
    """One row per check: status, name, what was found and the fix."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        detail = Text(check.detail)
        if check.fix:
            detail.append(f"\n-> {check.fix}", style="cyan")
        table.add_row(Text(check.status, style=_COLOURS[check.status]), check.name, detail)
    return table
