"""How commands print: a console that is wide enough for their tables, and numbers in few digits."""

from __future__ import annotations

from rich.console import Console


def wide_console(columns: int = 88) -> Console:
    """A console of at least ``columns`` columns, which the tables need."""
    out = Console()
    return out if out.width >= columns else Console(width=columns)


def short_ms(ms: float) -> str:
    """Milliseconds with one decimal, or with none from one second on."""
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}"


def short_count(count: float) -> str:
    """Three digits, in thousands or millions if that is shorter."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.{2 if count < 10 * size else 1 if count < 100 * size else 0}f}{unit}"
    return f"{count:.0f}"
