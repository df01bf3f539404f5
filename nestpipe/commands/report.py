"""``nestpipe report``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from nestpipe.machine.files import require_writable, write_atomically


@dataclass(frozen=True)
class ReportCommand:
    """Make tables and figures from existing records: one report.html with everything in it, and separate files for
    each (tables/*.md, .csv, .tex; figures/*.png, .svg). Nothing is run."""

    only: str | None = None
    """Comma-separated tables and figures, such as table2,fig9: print and write only these, and no report.html."""
    folder: Path = Path("results/out")
    """The folder of records, timelines and outputs."""
    records: Path | None = None
    """Other records: a folder of stores, one store (of a sweep or of `run --store`), or a file of `run --json` or
    `pytest suites/ --benchmark`. The report, tables and figures are then written next to them."""
    out: Path | None = None
    """The report (default: report.html in --folder, or next to --records)."""


def main(arguments: Sequence[str]) -> int:
    from results.report.render import to_markdown
    from results.report.report import make_all, to_report
    from results.report.write import write_artefacts
    from results.sources import sources_from

    command = tyro.cli(ReportCommand, prog="nestpipe report", args=arguments)
    folder = command.folder
    if command.records:
        folder = command.records if command.records.is_dir() else command.records.parent
    target = command.out or folder / "report.html"
    require_writable(target)
    sources = sources_from(command.folder, command.records)
    names = [name.strip() for name in command.only.split(",") if name.strip()] if command.only else None
    artefacts = make_all(sources, names)
    written = write_artefacts(artefacts, target.parent)
    for sentence in sources.skipped:
        print(f"skipped: {sentence}")
    for sentence in sources.diverged():
        print(sentence)
    if names:
        for artefact in artefacts:
            for table in artefact.tables:
                print(to_markdown(table))
            for mismatch in artefact.mismatches:
                print(f"does not match: {mismatch.what}\n  {mismatch.why}")
            for part in artefact.missing:
                print(f"no records in '{part}': nestpipe reproduce --only {part}")
        print("\n".join(f"written: {path}" for path in written))
        return 0
    write_atomically(target, to_report(sources, artefacts))
    count = sum(len(artefact.mismatches) for artefact in artefacts)
    print(f"{target}: {len(artefacts)} tables and figures, {count} numbers that do not match, explained at the top")
    for part in sorted({part for artefact in artefacts for part in artefact.missing}):
        print(f"no records in '{part}': nestpipe reproduce --only {part}")
    return 0
