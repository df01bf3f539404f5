"""How every figure looks: legible in print and in grey, a colour and a mark per method, the same bytes each time."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display; before pyplot

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from results.artefacts import Picture

#: Seaborn's colour-blind palette (ten colours that differ in lightness too).
COLOURS: Sequence[Any] = sns.color_palette("colorblind")
#: Parts of a step, from the bottom of a bar up: title, colour, hatch. Hatches tell them apart in grey.
STEP_PARTS: Mapping[str, tuple[str, Any, str]] = {
    "dense_ms": ("dense", COLOURS[0], ""),
    "update_ms": ("update and hand-over", COLOURS[4], ".."),
    "exposed_lookup_ms": ("exposed lookup", COLOURS[1], "//"),
    "exposed_communication_ms": ("exposed communication", COLOURS[2], "\\\\"),
    "rest_ms": ("rest", COLOURS[7], ""),
}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")


def style() -> None:
    """Fonts and lines for a column of a paper; text stays text in SVG only where outlines would differ by machine."""
    sns.set_theme(context="paper", style="whitegrid", palette="colorblind", font="DejaVu Sans")
    plt.rcParams.update(
        {
            "svg.hashsalt": "nestpipe",
            "svg.fonttype": "path",
            "figure.dpi": 100,
            "savefig.dpi": 200,
            "font.size": 9,
            "axes.titlesize": 9,
            "axes.labelsize": 9,
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
            "legend.fontsize": 8,
            "hatch.linewidth": 0.5,
        }
    )


def figure(columns: int, width: float = 3.4, height: float = 2.9, rows: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A row of panels; always a list of axes."""
    style()
    made, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained", **options
    )
    return made, list(axes.flat)


def picture(name: str, caption: str, alt: str, made: Figure) -> Picture:
    """The figure as SVG and PNG, without a date."""
    made.draw_without_rendering()
    made.set_layout_engine("none")  # placed once, for both forms
    svg, png = io.StringIO(), io.BytesIO()
    made.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    made.savefig(png, format="png", metadata={"Software": None})
    plt.close(made)
    return Picture(name, caption, alt, svg.getvalue(), png.getvalue())


def marker(i: int) -> str:
    return _MARKERS[i % len(_MARKERS)]


def stacked_bars(
    axes: Axes,
    groups: Sequence[str],
    bars: Sequence[str],
    parts: Mapping[tuple[str, str], Mapping[str, float]],
    unit: str,
) -> None:
    """Bars of ``parts`` (by group and bar: ms by name of STEP_PARTS) side by side within each group, named below."""
    width, place, names, top = 0.8, 0.0, list[str](), 0.0
    ticks, middles = [], []
    for group in groups:
        first = place
        for bar in bars:
            values = parts.get((group, bar))
            if values is None:
                continue
            bottom = 0.0
            for name, (_, colour, hatch) in STEP_PARTS.items():
                value = values.get(name, 0.0)
                axes.bar(place, value, width, bottom, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
                bottom += value
            top = max(top, bottom)
            ticks.append(place)
            names.append(bar)
            place += 1
        middles.append((first + place - 1) / 2)
        place += 0.7
    axes.set_xticks(ticks, names, rotation=90, fontsize=7)
    for middle, group in zip(middles, groups, strict=True):
        axes.annotate(
            group,
            (middle, 1.0),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=7,
            annotation_clip=False,
        )
    axes.set_ylabel(unit)
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, top * 1.06 or None)  # room for marks on top of the highest bar


def parts_legend(made: Figure) -> None:
    """One legend for all panels, above them."""
    handles = [
        plt.Rectangle((0, 0), 1, 1, facecolor=colour, hatch=hatch * 2, edgecolor="white", label=title)
        for title, colour, hatch in STEP_PARTS.values()
    ]
    made.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
