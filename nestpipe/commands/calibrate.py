"""``nestpipe calibrate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.table import Table

from nestpipe.commands.terminal import wide_console
from nestpipe.machine.files import write_atomically
from nestpipe.machine.json_files import json_text
from nestpipe.measurement.provenance import provenance
from nestpipe.simulator.calibrate.measure import CalibrateConfig, calibrate, profile_toml
from nestpipe.simulator.calibrate.predict_and_measure import Comparison, mean_error_pct, predict_and_measure
from nestpipe.simulator.profile import local_profile


@dataclass(frozen=True)
class CalibrateCommand:
    """Measure this machine on real ranks, and save it as the hardware profile `local` for `nestpipe simulate` and
    `nestpipe advise`."""

    measure: Annotated[CalibrateConfig, tyro.conf.arg(name="")] = field(default_factory=CalibrateConfig)
    out: Path | None = None
    """Write the profile to this .toml file instead of the user's configuration folder."""
    validate: bool = False
    """Afterwards predict four other configurations, run them, and show predicted and measured steps."""
    json: Path | None = None
    """Write profile, samples and checks to this file."""


def main(arguments: Sequence[str]) -> int:
    command = tyro.cli(CalibrateCommand, prog="nestpipe calibrate", args=arguments)
    out = wide_console()
    say = partial(out.print, highlight=False, markup=False, soft_wrap=True)
    hardware, samples = calibrate(command.measure, say)
    path = command.out or local_profile()
    write_atomically(path, profile_toml(hardware, command.measure))
    say(f"profile written to {path}; use it as --hardware {'local' if command.out is None else path}")
    checks = predict_and_measure(hardware, command.measure, progress=say) if command.validate else []
    if checks:
        out.print(_table(checks))
        say(f"mean error {mean_error_pct(checks):.1f} % over {len(checks)} steps, max {_largest(checks):.1f} %")
    if command.json:
        data = {
            "hardware": asdict(hardware),
            "samples": [asdict(s) for s in samples],
            "checks": [{**asdict(c), "error_pct": c.error_pct} for c in checks],
            "mean_error_pct": mean_error_pct(checks) if checks else None,
            "provenance": provenance(),
        }
        write_atomically(command.json, json_text(data, indent=1, default=str) + "\n")
    return 0


def _largest(checks: Sequence[Comparison]) -> float:
    return max(abs(check.error_pct) for check in checks)


def _table(checks: Sequence[Comparison]) -> Table:
    table = Table(
        title=f"SIMULATED and MEASURED steps, {checks[0].workers} ranks, ms; dense PACED",
        caption="configurations that calibration has not seen, predicted before they ran",
        box=box.SIMPLE_HEAD,
    )
    for head in ("batch x dim, pace, N", "method", "simulated", "measured", "error, %"):
        table.add_column(head, justify="left" if head in ("batch x dim, pace, N", "method") else "right")
    for c in checks:
        case = f"{c.case.batch} x {c.case.dim}, {c.case.pace_ms:g} ms, {c.case.micro_batches}"
        measured = f"{c.measured_ms:.1f} ± {c.spread_ms:.1f}"
        table.add_row(case, c.method, f"{c.predicted_ms:.1f}", measured, f"{c.error_pct:+.1f}")
    return table
