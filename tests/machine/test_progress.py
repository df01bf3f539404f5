"""Progress bars: a line per stage without a terminal, a bar for each method next to the others on one."""

from __future__ import annotations

import io

from rich.console import Console

from nestpipe.machine.progress import progress, progress_of_stages, progress_side_by_side


def test_stages_are_lines_without_a_terminal():
    out = io.StringIO()
    with progress_of_stages(Console(file=out), "starting") as show:
        for title, done in (("a", 1), ("a", 2), ("b", 3)):
            show(title, done, 3)
    assert out.getvalue().split() == ["a", "b"]


def test_side_by_side_each_title_has_its_count_and_note():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with progress_side_by_side(console, ("serial", "nestpipe"), "starting ranks") as show:
        show("nestpipe", 3, 7, "loss 4.000")
    text = out.getvalue()
    assert "serial" in text and "starting ranks" in text and "3/7" in text and "loss 4.000" in text


def test_work_on_data_is_silent_without_a_terminal(capsys):
    with progress("reading", 2) as advance:
        advance(1)
    assert capsys.readouterr() == ("", "")
