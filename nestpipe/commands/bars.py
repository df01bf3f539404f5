"""Progress of long commands: a bar on a terminal, a line per title where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(console: Console, waiting: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yields ``show(title, done, total)``; ``waiting`` stands there before the first call."""
    said = [waiting]
    columns = (TextColumn("{task.description:<34}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    off = not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=off) as bars:
        task = bars.add_task(waiting, total=None)

        def show(title: str, done: int, total: int) -> None:
            bars.update(task, description=title, completed=done, total=total)
            if off and title != said[0]:
                console.print(title, highlight=False)
            said[0] = title

        yield show
