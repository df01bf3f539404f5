"""The numbers that the paper (arXiv 2604.06956) and notes on it publish, one per row of ``published.csv``.

Marks: ``T`` is printed in the paper's tables. ``N`` is from public notes on the paper. ``D`` is derived from T by
arithmetic: the step times that the QPS and scaling columns together imply, at 512 samples per worker.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from pathlib import Path

MARKS = {"T": "printed in the paper's tables", "N": "from public notes on the paper", "D": "derived from its tables"}


class PublishedError(ValueError):
    """The file cannot be used. The message is one line: the file, the line and what is wrong."""


@dataclass(frozen=True)
class Published:
    """One number. ``where``: table (Roman) or figure. ``setting``: what differs from the paper's reference set-up."""

    where: str
    cluster: str
    dataset: str
    workers: int
    method: str
    setting: str
    metric: str
    value: float
    unit: str
    mark: str


def load_published(path: Path | None = None) -> list[Published]:
    """All rows of ``path`` (default: the file next to this module). Raises PublishedError."""
    path = path or Path(__file__).with_name("published.csv")
    names = [field.name for field in fields(Published)]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PublishedError(f"{path}: cannot be read ({error})") from error
    lines = list(csv.reader(text.splitlines()))
    if not lines or lines[0] != names:
        raise PublishedError(f"{path}: the first line must be {','.join(names)}")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(names):
            raise PublishedError(f"{path}, line {number}: {len(line)} fields, not {len(names)}")
        cells = dict(zip(names, line, strict=True))
        try:
            workers, value = int(cells.pop("workers")), float(cells.pop("value"))
        except ValueError as error:
            raise PublishedError(f"{path}, line {number}: {error}") from error
        if cells["mark"] not in MARKS:
            raise PublishedError(f"{path}, line {number}: mark '{cells['mark']}' is not one of {', '.join(MARKS)}")
        rows.append(Published(workers=workers, value=value, **cells))
    return rows
