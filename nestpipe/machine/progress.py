"""A progress bar for long work on data, where rich is installed and somebody watches; silent otherwise."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

#: Called with how much more has been done.
Advance = Callable[[float], None]


@contextlib.contextmanager
def progress(title: str, total: float) -> Iterator[Advance]:
    """``with progress("reading", 10) as advance: advance(1)``: a bar on standard error, if that is a terminal."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda amount: None
        return
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total)
        yield lambda amount: bars.advance(task, amount)
