"""``nestpipe advise``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.table import Table

from nestpipe.commands.terminal import short_ms, wide_console
from nestpipe.machine.files import write_atomically
from nestpipe.machine.json_files import json_text
from nestpipe.measurement.provenance import provenance
from nestpipe.simulator.advise import Advice, Choice, advise
from nestpipe.simulator.scenario import Scenario


@dataclass(frozen=True)
class AdviseCommand(Scenario):
    """For a model and a cluster: which method is best, with how many micro-batches, what limits it, and up to which
    size? Times are predicted on virtual clocks; nothing is run."""

    workers: int = 1536
    """Accelerators."""
    reach: int = 16
    """Look for changes in the answer between workers / reach and workers x reach."""
    json: Annotated[Path | None, tyro.conf.arg(help="Write the advice to this file.")] = field(default=None)


def main(arguments: Sequence[str]) -> int:
    command = tyro.cli(AdviseCommand, prog="nestpipe advise", args=arguments)
    advice = advise(command, command.workers, command.reach)
    out = wide_console()
    out.print(_table(advice, command))
    for line in _sentences(advice):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    if command.json:
        write_atomically(command.json, json_text(to_json(advice), indent=1, default=str) + "\n")
    return 0


def to_json(advice: Advice) -> dict[str, object]:
    """``best``, ``choices`` (fastest first), ``changes``; times in ms."""
    changes = [
        {"workers": c.workers, "before": _choice(c.before), "after": _choice(c.after), "text": c.text}
        for c in advice.changes
    ]
    return {
        "kind": "simulated",
        "best": _choice(advice.best),
        "choices": [_choice(c) for c in advice.choices],
        "changes": changes,
        "searched": [advice.smallest, advice.largest],
        "provenance": provenance(),
    }


def _choice(choice: Choice) -> dict[str, object]:
    return {**asdict(choice), "limited_by": choice.limited_by, "limited_by_text": choice.limited_by_text}


def _table(advice: Advice, command: AdviseCommand) -> Table:
    table = Table(
        title=f"SIMULATED: {command.hardware}, {command.workers} workers",
        caption="Milliseconds per step on virtual clocks, exposed parts. limits: how much of the step shrinks in\n"
        "proportion to the lane (the two that matter most). *: not plain synchronous training.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for head in ("method", "N", "step", "dense", "lookup", "comm.", "rest", "limits"):
        table.add_column(head, justify="left" if head in ("method", "limits") else "right", no_wrap=head != "limits")
    for c in advice.choices:
        parts = [c.parts_ms[name] for name in ("dense", "exposed_lookup", "exposed_communication")]
        row = [c.step_ms, *parts, abs(c.step_ms - sum(parts))]
        table.add_row(
            c.method + ("" if c.synchronous else " *"), str(c.micro_batches), *map(short_ms, row), _two_limits(c)
        )
    return table


def _two_limits(choice: Choice) -> str:
    largest = sorted(choice.limits.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{lane} {percent:.0f}%" for lane, percent in largest if percent >= 0.5)


def _sentences(advice: Advice) -> list[str]:
    best, fastest = advice.best, advice.choices[0]
    lines = [f"Best synchronous method at {best.workers} workers: {best.text}; predicted step {best.step_ms:.1f} ms."]
    if fastest != best:
        lines.append(
            f"{fastest.method} would take {fastest.step_ms:.1f} ms, but is not plain synchronous training "
            f"({fastest.objection})."
        )
    if not advice.changes:
        lines.append(f"The answer is the same from {advice.smallest} to {advice.largest} workers.")
    else:
        lines.append(f"Changes of the answer between {advice.smallest} and {advice.largest} workers (to within 2 %):")
        lines += [f"  {change.text}" for change in advice.changes]
    return lines
