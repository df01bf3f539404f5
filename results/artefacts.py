"""Tables and figures by name: what they are made from, what they are made of, and who makes them.

To add one, write ``function(Sources) -> Artefact`` and a line in ``ARTEFACTS``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pandas as pd

from results.sources import Sources

#: name -> "module:function", in the order of the report. Imported when asked for.
ARTEFACTS: Mapping[str, str] = {
    "table1": "results.tables.table1:table1",
    "table2": "results.tables.table2_3_4:table2",
    "table3": "results.tables.table2_3_4:table3",
    "table4": "results.tables.table2_3_4:table4",
    "ladder": "results.tables.ladder:ladder",
    "fig2": "results.figures.fig2_7_8_cluster_size:fig2",
    "fig6": "results.figures.fig6_convergence:fig6",
    "fig7": "results.figures.fig2_7_8_cluster_size:fig7",
    "fig8": "results.figures.fig2_7_8_cluster_size:fig8",
    "fig9": "results.figures.fig9_10_sizes:fig9",
    "fig10": "results.figures.fig9_10_sizes:fig10",
    "timeline": "results.figures.timeline:timeline",
    "records": "results.tables.other_records:other_records",
}


class UnknownArtefact(ValueError):
    """No table or figure of that name; the message lists the known ones."""


@dataclass(frozen=True)
class Table:
    """``frame``: cells as they are shown; ``cells``: one row per number, in full precision (the CSV file)."""

    name: str
    title: str
    caption: str
    frame: pd.DataFrame
    cells: pd.DataFrame


@dataclass(frozen=True)
class Picture:
    """``alt``: what it shows, in words, for those who do not see it."""

    name: str
    caption: str
    alt: str
    svg: str
    png: bytes = field(repr=False)


@dataclass(frozen=True)
class Mismatch:
    """Two numbers that should agree and do not. ``why``: the reason, or that none is known."""

    where: str
    what: str
    why: str


@dataclass(frozen=True)
class Artefact:
    """A table or figure of the paper with everything that belongs to it. ``missing``: records that it lacks."""

    name: str
    title: str
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    text: tuple[str, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    missing: tuple[str, ...] = ()


def make(name: str, sources: Sources) -> Artefact:
    """The artefact of that name. Raises UnknownArtefact."""
    if name not in ARTEFACTS:
        raise UnknownArtefact(f"no table or figure '{name}': one of {', '.join(ARTEFACTS)}")
    module, function = ARTEFACTS[name].split(":")
    maker: Callable[[Sources], Artefact] = getattr(importlib.import_module(module), function)
    return maker(sources)
