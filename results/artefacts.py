"""The tables and figures of the report by name, and the function that makes each.

To add one, write ``function(Sources) -> Artefact`` and add a line to ``ARTEFACTS``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pandas as pd

from results.sources import Sources

#: name -> "module:function", in the order of the report. A module is imported only when it is needed.
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
    """There is no table or figure of that name; the message lists the known ones."""


@dataclass(frozen=True)
class Table:
    """``frame``: the cells as they are shown. ``cells``: one row per number in full precision (the CSV file)."""

    name: str
    title: str
    caption: str
    frame: pd.DataFrame
    cells: pd.DataFrame


@dataclass(frozen=True)
class Picture:
    """``alt``: a description for readers who cannot see the picture."""

    name: str
    caption: str
    alt: str
    svg: str
    png: bytes = field(repr=False)


@dataclass(frozen=True)
class Mismatch:
    """Two numbers that should agree but do not. ``why``: the reason, or a statement that no reason is known."""

    where: str
    what: str
    why: str


@dataclass(frozen=True)
class Artefact:
    """A table or figure of the paper with everything that belongs to it. ``missing``: parts whose records it lacks."""

    name: str
    title: str
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    text: tuple[str, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    missing: tuple[str, ...] = ()


def make(name: str, sources: Sources) -> Artefact:
    """The artefact of that name. Raises UnknownArtefact if there is none."""
    if name not in ARTEFACTS:
        raise UnknownArtefact(f"there is no table or figure '{name}'; choose one of {', '.join(ARTEFACTS)}")
    module, function = ARTEFACTS[name].split(":")
    maker: Callable[[Sources], Artefact] = getattr(importlib.import_module(module), function)
    return maker(sources)
