"""``nestpipe doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from nestpipe.machine import doctor


@dataclass(frozen=True)
class Doctor:
    """Check versions, devices, gloo/NCCL, iproute2 and Slurm; name the fix for each thing missing."""


def main(arguments: Sequence[str]) -> int:
    tyro.cli(Doctor, prog="nestpipe doctor", args=arguments)
    checks = doctor.diagnose()
    doctor.print_report(checks)
    return doctor.exit_code(checks)
