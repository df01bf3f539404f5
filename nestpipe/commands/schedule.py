"""``nestpipe schedule``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from nestpipe.checker.rules import check
from nestpipe.drawing.text_grid import grid
from nestpipe.methods import Method, MethodOptions, UnknownMethod, find_method, method_from_file
from nestpipe.schedule.operations import MAX_MICRO_BATCHES, Schedule
from nestpipe.schedule.stages import STAGES
from nestpipe.schedule.text import to_text


@dataclass(frozen=True)
class ScheduleCommand:
    """Print one step of a method's schedule as a grid, or check it."""

    method: Annotated[str, tyro.conf.Positional]
    """A method (see `nestpipe methods`), or a file with a schedule in text form."""
    micro_batches: int = 4
    """Micro-batches per batch, for methods with a frozen window."""
    options: tyro.conf.OmitArgPrefixes[MethodOptions] = field(default_factory=MethodOptions)
    check: bool = False
    """Say whether this is synchronous training: exit 0, or exit 1 naming each stale read or race."""
    text: bool = False
    """Print the text form instead: edges and state, one operation a line; it can be edited and read back."""
    priced: bool = False
    """The schedule that the cost model times, and why, if that is not the method's own."""
    all: bool = False
    """With --check: every problem instead of the first ten."""


def main(arguments: Sequence[str]) -> int:
    command = tyro.cli(ScheduleCommand, prog="nestpipe schedule", args=arguments)
    if command.micro_batches < 1:
        raise ValueError(f"--micro-batches must be at least 1, not {command.micro_batches}")
    if command.micro_batches > MAX_MICRO_BATCHES:
        raise ValueError(f"--micro-batches must be at most {MAX_MICRO_BATCHES}, not {command.micro_batches}")
    method = _find(command.method, command.options)
    template = method.schedule(command.micro_batches)
    if command.priced:
        template = method.priced_schedule(command.micro_batches)
        if method.priced_as is not None:
            print(f"# {method.priced_as.reason}")
    if command.text:
        print(to_text(template), end="")
        return 0
    if not command.check:
        columns = shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else None
        picture = grid(template, columns)  # before any line is printed: a schedule with a deadlock has none
        print(
            f"{template.name}: one step t, N = {template.micro_batches}; R+1: for batch t+1, E.2: micro-batch 2 of t."
        )
        print("Time in made-up units; dots: compute idle; '<': began in the step before.\n")
        print(picture)
        letters = dict.fromkeys(op.ref.stage for op in template.ops)
        print("\n" + "  ".join(f"{letter} {STAGES[letter].title}" for letter in letters))
        return 0
    problems = check(template)
    if not problems:
        print(
            f"{template.name}: synchronous. No race, no deadlock, every read sees every earlier update, in one order."
        )
        return 0
    print(f"{template.name}: NOT plain synchronous training, {len(problems)} problem{'s' * (len(problems) > 1)}:")
    shown = problems if command.all else problems[:10]
    for hint in _hints(template):
        print(f"  {hint}")
    for problem in shown:
        print(f"  {problem}")
    if len(shown) < len(problems):
        print(f"  ... and {len(problems) - len(shown)} more (--all shows them)")
    return 1


def _hints(template: Schedule) -> list[str]:
    """What is behind many problems at once."""
    there = {op.ref.stage for op in template.ops}
    hints = [
        f"there is no {letter} ({stage.title}), which every step needs"
        for letter, stage in STAGES.items()
        if stage.required == "always" and letter not in there
    ]
    if len(template.ops) > 1 and not any(op.after for op in template.ops):
        hints.append(
            "no operation waits for another: a line 'derive edges' adds the waits that reads and writes ask for"
        )
    return hints


def _find(name: str, options: MethodOptions) -> Method:
    if "/" in name or Path(name).suffix or Path(name).is_file():
        return method_from_file(name)
    try:
        return find_method(name).with_options(options)
    except UnknownMethod as error:
        raise UnknownMethod(f"{error}; and there is no file of that name") from None
