"""Progress bars on a terminal: for one piece of work, for stages one after the other, for methods side by side.

The first is silent without rich or without a terminal. The other two are for the command line, which has rich.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

try:
    from rich import progress as bars
    from rich.console import Console
except ImportError:  # the command line's packages are optional for the library
    bars = None  # type: ignore[assignment]

#: Called with the amount of work done since the last call.
Advance = Callable[[float], None]


@contextlib.contextmanager
def progress(title: str, total: float) -> Iterator[Advance]:
    """``with progress("reading", 10) as advance: advance(1)``: a bar on standard error, if that is a terminal."""
    if bars is None or not sys.stderr.isatty():
        yield lambda amount: None
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=total)
        yield lambda amount: shown.advance(task, amount)


@contextlib.contextmanager
def progress_of_stages(console: Console, waiting: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yields ``show(title, done, total)``: one bar whose title changes; without a terminal, a line per title.

    ``waiting``: the title before the first call.
    """
    last = waiting
    columns = (
        bars.TextColumn("{task.description:<34}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    off = not console.is_terminal
    with bars.Progress(*columns, console=console, transient=True, disable=off) as shown:
        task = shown.add_task(waiting, total=None)

        def show(title: str, done: int, total: int) -> None:
            nonlocal last
            shown.update(task, description=title, completed=done, total=total)
            if off and title != last:
                console.print(title, highlight=False)
            last = title

        yield show


@contextlib.contextmanager
def progress_side_by_side(
    console: Console, titles: Sequence[str], waiting: str
) -> Iterator[Callable[[str, int, int, str], None]]:
    """Yields ``show(title, done, total, note)``: a bar for each of ``titles``; ``waiting`` is the first note."""
    columns = (
        bars.TextColumn("{task.description:>14}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[note]}"),
    )
    with bars.Progress(*columns, console=console, transient=True) as shown:
        tasks = {title: shown.add_task(title, total=None, note=waiting) for title in titles}

        def show(title: str, done: int, total: int, note: str) -> None:
            shown.update(tasks[title], completed=done, total=total, note=note)

        yield show
