"""``nestpipe fit``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from nestpipe.commands.terminal import wide_console
from nestpipe.machine.files import write_atomically
from nestpipe.machine.json_files import json_text
from nestpipe.measurement.provenance import provenance
from nestpipe.simulator.fit.assumptions import Assumption, assumptions
from nestpipe.simulator.fit.figure_points import NPU, NotePoint, SweepPoint, micro_batch_sweep, note_points
from nestpipe.simulator.fit.least_squares import Errors
from nestpipe.simulator.fit.report import Report, full_fit
from nestpipe.simulator.profile import load_profile
from nestpipe.simulator.scenario import paper_methods

#: The methods in the tables of step times, by the paper's names.
_SHOWN = ("TorchRec", "2D-SP", "UniEmb", "NestPipe", "NestPipe+2D-SP")


@dataclass(frozen=True)
class FitCommand:
    """Fit the cost model to the published step times and say what the fit is worth: errors in sample and held out,
    what the data identify, what is assumed, and what the model does not explain."""

    published: Path | None = None
    """Published numbers (default: the project's results/published.csv)."""
    profiles: bool = True
    """Fit again with other values of the parameters that are not searched (takes some seconds)."""
    json: Path | None = None
    """Write in_sample, held_out_methods, held_out_scales and the rest to this file."""


def main(arguments: Sequence[str]) -> int:
    from results.published import load_published  # the library does not need the folder results

    command = tyro.cli(FitCommand, prog="nestpipe fit", args=arguments)
    rows = load_published(command.published)
    methods = paper_methods()
    profile = load_profile(NPU)
    report = full_fit(rows, profile.workload, methods, command.profiles)
    moved = assumptions(report.reference, profile.workload, {name: methods[name] for name in _SHOWN})
    notes = note_points(rows, methods)
    sweeps = {
        (clustering, cost): micro_batch_sweep(profile, methods["NestPipe"], 1536, clustering, cost)
        for clustering in (True, False)
        for cost in (0.0, 0.9, 4.0)
    }
    out = wide_console()
    _print_errors(out, report)
    _print_parameters(out, report)
    _print_assumptions(out, moved)
    out.print(_note_table(notes))
    _print_sweeps(out, sweeps)
    if command.json:
        data = {
            **report.to_json(),
            "assumptions": [asdict(a) for a in moved],
            "notes": [asdict(n) for n in notes],
            "micro_batch_sweep": [
                {"clustering": clustering, "micro_batch_ms": cost, "points": [asdict(p) for p in points]}
                for (clustering, cost), points in sweeps.items()
            ],
            "provenance": provenance(),
        }
        write_atomically(command.json, json_text(data, indent=1, default=str) + "\n")
    return 0


def _new_table(title: str, caption: str, *heads: str) -> Table:
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in heads:
        text = head in ("method", "parameter", "what is assumed", "remark", "values that the data allow", "point")
        table.add_column(head, justify="left" if text else "right", no_wrap=head in ("parameter", "method"))
    return table


def _print_errors(out: Console, report: Report) -> None:
    table = _new_table(
        "step times, published (derived from QPS and scaling) and SIMULATED, ms",
        "errors in percent; held out: fitted without the cell",
        "method",
        "n",
        "published",
        "fitted",
        "error",
        "held out: methods",
        "held out: scales",
    )
    methods, scales = (
        {(c.method, c.workers): f"{c.error_pct:+.2f}" for c in errors.cells}
        for errors in (report.held_out_methods, report.held_out_scales)
    )
    for c in sorted(report.in_sample.cells, key=lambda c: (_SHOWN.index(c.method), c.workers)):
        key = (c.method, c.workers)
        numbers = (f"{c.published_ms:.0f}", f"{c.predicted_ms:.0f}", f"{c.error_pct:+.2f}")
        table.add_row(c.method, str(c.workers), *numbers, methods.get(key, ""), scales.get(key, ""))
    out.print(table)
    for name, errors in (
        ("in sample", report.in_sample),
        ("held-out methods", report.held_out_methods),
        ("held-out scales", report.held_out_scales),
    ):
        out.print(f"{name:<17} {_errors(errors)}", highlight=False)
    out.print(
        f"rounding floor    mean {report.rounding_floor_pct:.2f} %: what the two decimals of a published QPS allow",
        highlight=False,
    )


def _errors(errors: Errors) -> str:
    return f"mean {errors.mean_pct:.2f} %, max {errors.max_pct:.2f} %, {len(errors.cells)} cells"


def _print_parameters(out: Console, report: Report) -> None:
    table = _new_table(
        f"{len(report.identified)} fitted parameters ({report.parameters} with those chosen by looking)",
        "shared: part of the variance that comes from trade-offs with the others",
        "parameter",
        "value",
        "std. error",
        "shared",
        "identified",
    )
    for i in report.identified:
        digits = 4 if abs(i.value) < 10 else 1
        numbers = (f"{i.value:.{digits}f}", f"{i.error:.{digits}f}", f"{i.shared:.0%}")
        table.add_row(i.name, *numbers, "yes" if i.known else "NO")
    out.print(table)
    if report.chosen:
        tried = _new_table("not searched", "", "parameter", "value", "values that the data allow", "tried")
        for c in report.chosen:
            allowed = ", ".join(f"{v:.3g}" for v in c.allowed)
            tried.add_row(c.name, f"{c.value:.3g}", allowed, ", ".join(f"{t.value:.3g}" for t in c.tried))
        out.print(tried)


def _print_assumptions(out: Console, moved: Sequence[Assumption]) -> None:
    table = _new_table(
        "assumptions: change of the step at 1,536 workers in percent\nif one is 20 % lower and 20 % higher",
        "counts: the nearest values that divide; TR TorchRec, NP NestPipe",
        "parameter",
        "value",
        *(name.replace("TorchRec", "TR").replace("NestPipe", "NP") for name in _SHOWN),
    )
    for a in moved:
        table.add_row(a.name, f"{a.value:.4g}", *(_move(a.moves[name]) for name in _SHOWN))
    out.print(table)
    for a in moved:
        out.print(f"{a.name}: {a.text} ({a.basis})", highlight=False, soft_wrap=True)


def _move(pair: tuple[float, float]) -> str:
    low, high = (round(x, 1) + 0.0 for x in pair)
    return "0" if low == high == 0 else f"{low:+.1f} {high:+.1f}"


def _note_table(notes: Sequence[NotePoint]) -> Table:
    table = _new_table(
        "notes on the paper's figures (secondary sources) and SIMULATED",
        "",
        "point",
        "published",
        "simulated",
        "remark",
    )
    for n in notes:
        where = f"{n.figure}: {n.method} {n.workers} {n.setting} {n.metric}, {n.unit}"
        table.add_row(where, f"{n.published:g}", f"{n.simulated:.2f}", n.remark)
    return table


def _print_sweeps(out: Console, sweeps: dict[tuple[bool, float], list[SweepPoint]]) -> None:
    first = next(iter(sweeps.values()))
    table = _new_table(
        "Fig. 9, SIMULATED: NestPipe at 1,536 workers, ms by micro-batch size",
        "cost: fixed dense ms of each micro-batch (the data allow 0 to 4); clustering off:\n"
        "keys repeat between micro-batches as measured on synthetic data",
        "clustering",
        "cost",
        *(str(p.micro_batch) for p in first),
    )
    for (clustering, cost), points in sweeps.items():
        table.add_row("on" if clustering else "off", f"{cost:g}", *(f"{p.step_ms:.0f}" for p in points))
    table.add_row("exposed of total All2All, %", "", *(f"{p.exposed_pct:.1f}" for p in first))
    without = sweeps[False, 0.9]
    table.add_row("total All2All, clustering off", "", *(f"{p.total_ms:.0f}" for p in without))
    out.print(table)
