"""Consoles wide enough for the tables, and numbers in few digits."""

from __future__ import annotations

import pytest

from nestpipe.commands.terminal import short_count, short_ms, wide_console


@pytest.mark.parametrize(("shell", "width"), [("40", 88), ("120", 120)])
def test_a_narrow_terminal_does_not_break_tables(monkeypatch, shell, width):
    monkeypatch.setenv("COLUMNS", shell)
    assert wide_console().width == width


def test_numbers_are_short():
    assert [short_ms(x) for x in (0.04, 12.34, 999.94, 1234.5)] == ["0.0", "12.3", "999.9", "1234"]
    counts = (12, 999, 1000, 12_345, 123_456, 1_234_567)
    assert [short_count(x) for x in counts] == ["12", "999", "1.00k", "12.3k", "123k", "1.23M"]
