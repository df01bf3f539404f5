"""Artefacts as files: every table in three formats, every figure in two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nestpipe.machine.files import write_atomically
from results.artefacts import Artefact
from results.report.render import to_csv, to_latex, to_markdown


def write_artefacts(artefacts: Sequence[Artefact], folder: Path) -> list[Path]:
    """tables/NAME.md, .csv and .tex; figures/NAME.svg and .png. Raises OSError if they cannot be written."""
    written = []
    for artefact in artefacts:
        for table in artefact.tables:
            for suffix, render in ((".md", to_markdown), (".csv", to_csv), (".tex", to_latex)):
                path = folder / "tables" / (table.name + suffix)
                write_atomically(path, render(table))
                written.append(path)
        for picture in artefact.pictures:
            path = folder / "figures" / f"{picture.name}.svg"
            write_atomically(path, picture.svg)
            (folder / "figures" / f"{picture.name}.png").write_bytes(picture.png)
            written += [path, path.with_suffix(".png")]
    return written
