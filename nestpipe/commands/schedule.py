"""``nestpipe schedule``."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from nestpipe.checker.observed_run import violations
from nestpipe.checker.problem import Problem
from nestpipe.checker.requirements import lanes_without_waiting
from nestpipe.checker.rules import check
from nestpipe.drawing.text_grid import grid
from nestpipe.measurement.trace import spans_of_perfetto
from nestpipe.methods import Method, MethodOptions, UnknownMethod, find_method, method_from_file
from nestpipe.schedule.building import folded
from nestpipe.schedule.operations import MAX_MICRO_BATCHES, Schedule
from nestpipe.schedule.stages import STAGES
from nestpipe.schedule.text import to_text

#: A trace stores times in floating point, so they may be off by a few nanoseconds.
_CLOCK_NS = 10


@dataclass(frozen=True)
class ScheduleCommand:
    """Print one step of a method's schedule as a grid, or check it."""

    method: Annotated[str, tyro.conf.Positional]
    """A method (see `nestpipe methods`), or a file with a schedule in text form."""
    micro_batches: int = 4
    """Micro-batches per batch, for methods with a frozen window."""
    options: tyro.conf.OmitArgPrefixes[MethodOptions] = field(default_factory=MethodOptions)
    check: bool = False
    """Say whether this is synchronous training: exit 0 if it is, else exit 1 and name each stale read or race."""
    text: bool = False
    """Print the text form instead: edges and state, one operation per line; it can be edited and read back."""
    priced: bool = False
    """Use the schedule that the cost model times, and say why if that is not the method's own."""
    trace: Path | None = None
    """Say whether a recorded run (a file of `nestpipe run --trace`) followed the schedule: exit 0 if so, else 1."""
    all: bool = False
    """With --check or --trace: show every problem instead of the first ten."""


def main(arguments: Sequence[str]) -> int:
    command = tyro.cli(ScheduleCommand, prog="nestpipe schedule", args=arguments)
    if command.micro_batches < 1:
        raise ValueError(f"--micro-batches must be at least 1, not {command.micro_batches}")
    if command.micro_batches > MAX_MICRO_BATCHES:
        raise ValueError(f"--micro-batches must be at most {MAX_MICRO_BATCHES}, not {command.micro_batches}")
    if command.trace is not None:
        return _compare_with_trace(command, command.trace)
    method = _find(command.method, command.options)
    schedule = method.schedule(command.micro_batches)
    if command.priced:
        schedule = method.priced_schedule(command.micro_batches)
        if method.priced_as is not None:
            print(f"# {method.priced_as.reason}")
    if command.text:
        print(to_text(schedule), end="")
        return 0
    if not command.check:
        columns = shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else None
        picture = grid(schedule, columns)  # before any line is printed: a schedule with a deadlock has none
        print(
            f"{schedule.name}: one step t, N = {schedule.micro_batches}; R+1: for batch t+1, E.2: micro-batch 2 of t."
        )
        print("Time is in made-up units; dots: compute is idle; '<': began in the previous step.\n")
        print(picture)
        letters = dict.fromkeys(op.ref.stage for op in schedule.ops)
        print("\n" + "  ".join(f"{letter} {STAGES[letter].title}" for letter in letters))
        return 0
    problems = check(schedule)
    if not problems:
        print(
            f"{schedule.name}: synchronous. No race, no deadlock, every read sees every earlier update, in one order."
        )
        return 0
    print(f"{schedule.name}: NOT plain synchronous training, {len(problems)} problem{'s' * (len(problems) > 1)}:")
    for hint in _hints(schedule):
        print(f"  {hint}")
    _print_some(_grouped(problems), command.all)
    return 1


def _grouped(problems: Sequence[Problem]) -> list[str]:
    """One line for the same fault of an operation in several steps: the first, and how often it occurs."""
    found: dict[str, list[str]] = {}
    for problem in problems:  # all numbers but those of micro-batches
        found.setdefault(re.sub(r"(?<![.\d])\d+", "#", str(problem)), []).append(str(problem))
    return [same[0] + (f" (in {len(same)} steps)" if len(same) > 1 else "") for same in found.values()]


def _compare_with_trace(command: ScheduleCommand, path: Path) -> int:
    try:
        ranks = spans_of_perfetto(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"--trace {path}: cannot be read: {error}") from None
    if not any(span.stage == "O" for rank in ranks for span in rank):
        raise ValueError(f"--trace {path}: it contains no whole step")
    micro_batches = max(span.micro for rank in ranks for span in rank)
    schedule = _find(command.method, command.options).schedule(micro_batches)
    groups = command.options.replica_groups if schedule.replicated else 1
    # The engine has no lane that would wait for no other rank; a foreign pipeline has the lanes that it declares.
    folded_lanes = folded(schedule, lanes_without_waiting(len(ranks) // groups, len(ranks)))
    sometimes = "D" if command.options.sync_interval > 1 else ""
    sometimes += "EG" if len(ranks) == groups else ""  # one rank a group: TorchRec exchanges nothing
    texts = []
    for rank, spans in enumerate(ranks):
        wrong = [violations(spans, s, sometimes, stopped=True, clock_ns=_CLOCK_NS) for s in (schedule, folded_lanes)]
        texts += [f"rank {rank}: {text}" for text in min(wrong, key=len)]
    steps = len({span.batch for rank in ranks for span in rank if span.stage == "O"})
    if not texts:
        print(f"{schedule.name}: the run followed the schedule, {steps} steps on {len(ranks)} ranks.")
        return 0
    print(f"{schedule.name}: the run did NOT follow the schedule ({len(texts)} times in {steps} steps):")
    _print_some(texts, command.all)
    return 1


def _print_some(lines: Sequence[object], every: bool) -> None:
    shown = lines if every else lines[:10]
    for line in shown:
        print(f"  {line}")
    if len(shown) < len(lines):
        print(f"  ... and {len(lines) - len(shown)} more (--all shows them)")


def _hints(schedule: Schedule) -> list[str]:
    """Causes that each explain many problems at once."""
    there = {op.ref.stage for op in schedule.ops}
    hints = [
        f"there is no {letter} ({stage.title}), which every step needs"
        for letter, stage in STAGES.items()
        if stage.required == "always" and letter not in there
    ]
    if len(schedule.ops) > 1 and not any(op.after for op in schedule.ops):
        hints.append("no operation waits for another: a line 'derive edges' adds the waits that reads and writes need")
    return hints


def _find(name: str, options: MethodOptions) -> Method:
    if "/" in name or Path(name).suffix or Path(name).is_file():
        return method_from_file(name)
    try:
        return find_method(name).with_options(options)
    except UnknownMethod as error:
        raise UnknownMethod(f"{error}; and there is no file of that name") from None
