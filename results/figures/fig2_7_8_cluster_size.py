"""Figures 2, 7 and 8: what grows with the cluster. Published points, simulated lines, this machine's ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from results.artefacts import Artefact
from results.experiments.part_names import FOUR, NPU, TWO
from results.figures.style import COLOURS, figure, marker, parts_legend, picture, stacked_bars
from results.frames.labels import in_order, label_of, labelled, only, variants
from results.sources import Sources
from results.tables.figure_notes import note_mismatches, note_table, notes_of

_BARS = ("serial", "2d-sp", "uniemb", "nestpipe")
_LINES = (*_BARS, "nestpipe+2d-sp")


def fig2(sources: Sources) -> Artefact:
    """Impact of the cluster's size on lookup and communication overhead, without any pipelining."""
    simulated = _of(sources.simulated_means(NPU), ("serial",))
    published = sources.published_numbers()
    local = _of(sources.measured_medians(TWO, FOUR), ("serial",))
    made, axes = figure(3)
    for panel, metric, title in zip(axes, ("lookup_share", "comm_share"), ("lookup", "communication"), strict=False):
        notes = published[(published["where"] == "2") & (published["metric"] == metric)]
        if len(simulated):
            line = simulated.sort_values("workers")
            panel.plot(line["workers"], line[metric], marker="o", color=COLOURS[0], label="simulated")
        panel.plot(notes["workers"], notes["value"], "D", color="black", fillstyle="none", label="published [N]")
        panel.set(title=f"exposed {title}", xlabel="workers", ylabel="share of the step, %", ylim=(0, 60))
        panel.legend()
    _shares(axes[2], local)
    found = notes_of(sources, "2")
    return Artefact(
        "fig2",
        "Figure 2: lookup and communication overhead by cluster size (RQ3)",
        (note_table(found, "fig2", "Figure 2: published points"),),
        (
            picture(
                "fig2",
                "TorchRec as the paper calls it (serial, nothing hidden). Left and middle: the NPU cluster. Right: "
                "real processes on this machine, medians.",
                "Three panels: exposed lookup and exposed communication as shares of the step, growing from 128 to "
                "1,536 workers, and the two shares as measured on two and four ranks.",
                made,
            ),
        ),
        mismatches=tuple(note_mismatches(found, "Figure 2")),
        missing=sources.missing(NPU, TWO, FOUR),
    )


def _shares(panel: Axes, local: pd.DataFrame) -> None:
    panel.set(title="measured here", xlabel="ranks", ylabel="share of the step, %")
    if local.empty:
        return
    for i, (pace, group) in enumerate(_families(local)):
        line = group.sort_values("workers")
        for metric, style, name in (("lookup_share", "-", "lookup"), ("comm_share", "--", "communication")):
            panel.plot(
                line["workers"], line[metric], style, marker=marker(i), color=COLOURS[i], label=f"{name}, {pace}"
            )
    panel.set(xticks=sorted(set(local["workers"])), ylim=(0, None))
    panel.legend(fontsize=6)


def fig7(sources: Sources) -> Artefact:
    """Step latency and its parts by cluster size."""
    simulated = _of(sources.simulated_means(NPU), _BARS)
    local = _of(sources.measured_medians(TWO, FOUR), _BARS)
    families = _families(local)
    made, axes = figure(
        1 + len(families), width=4.2, height=3.4, gridspec_kw={"width_ratios": [2, *[1] * len(families)]}
    )
    axes[0].set_title("simulated: NPU cluster, workers", pad=16)
    if len(simulated):
        _bars(axes[0], simulated, _published_steps(sources))
    for panel, (pace, group) in zip(axes[1:], families, strict=True):
        _set_title(panel, f"measured here, ranks, {pace}", 16)
        _bars(panel, group, {})
    parts_legend(made)
    return Artefact(
        "fig7",
        "Figure 7: step latency breakdown by cluster size (RQ3)",
        pictures=(
            picture(
                "fig7",
                "Parts of a step that are on its critical path. Crosses: published step times, derived from the "
                "paper's QPS and scaling columns. The simulated dense time holds updates and dense AllReduce.",
                "Stacked bars of step latency for TorchRec, 2D-SP, UniEmb and NestPipe, by number of workers: "
                "TorchRec's lookup and communication grow with the cluster, NestPipe's step stays flat.",
                made,
            ),
        ),
        missing=sources.missing(NPU, TWO, FOUR),
    )


def _published_steps(sources: Sources) -> dict[tuple[str, str], float]:
    """Derived step times, ms, by workers and label as the bars have them."""
    frame = sources.published_numbers()
    frame = labelled(frame[(frame["metric"] == "step_from_qps") & (frame["mark"] == "D")])
    return {(f"{w:,}", label): v for w, label, v in zip(frame["workers"], frame["label"], frame["value"], strict=True)}


def _bars(panel: Axes, frame: pd.DataFrame, crosses: dict[tuple[str, str], float]) -> None:
    groups = [f"{workers:,}" for workers in sorted(set(frame["workers"]))]
    bars = [label_of(variant) for variant in in_order(variants(frame))]
    parts = {(f"{row['workers']:,}", row["label"]): row for row in labelled(frame).to_dict("records")}
    stacked_bars(panel, groups, bars, parts, "ms a step")
    order = [(group, bar) for group in groups for bar in bars if (group, bar) in parts]
    for place, key in zip(panel.get_xticks(), order, strict=True):
        if key in crosses:
            panel.plot(place, crosses[key], "x", color="black", markersize=4)


def fig8(sources: Sources) -> Artefact:
    """Utilisation: dense compute's share of the step."""
    simulated = _of(sources.simulated_means(NPU), _LINES)
    local = _of(sources.measured_medians(TWO, FOUR), _LINES)
    families = _families(local)
    published = sources.published_numbers()
    made, axes = figure(1 + len(families))
    _utilisation(axes[0], simulated)
    notes = published[published["where"] == "8"]
    axes[0].plot(notes["workers"], notes["value"], "D", color="black", fillstyle="none", label="published [N]")
    axes[0].set(title="simulated: NPU cluster", xlabel="workers", ylabel="utilisation, %", ylim=(0, 105))
    axes[0].legend(fontsize=6)
    for panel, (pace, group) in zip(axes[1:], families, strict=True):
        _utilisation(panel, group)
        _set_title(panel, f"measured here, {pace}", 6)
        panel.set(xlabel="ranks", ylabel="utilisation, %", ylim=(0, 105))
        panel.set_xticks(sorted(set(group["workers"])))
        panel.legend(fontsize=6)
    found = notes_of(sources, "8")
    return Artefact(
        "fig8",
        "Figure 8: resource utilisation by cluster size (RQ3)",
        (note_table(found, "fig8", "Figure 8: published points"),),
        (
            picture(
                "fig8",
                "Utilisation: dense forward and backward as a share of the step. NestPipe's published value is a lower "
                "bound (above 90 %).",
                "Lines of utilisation by number of workers: TorchRec falls to about 30 %, NestPipe stays above 90 %.",
                made,
            ),
        ),
        mismatches=tuple(note_mismatches(found, "Figure 8")),
        missing=sources.missing(NPU, TWO, FOUR),
    )


def _utilisation(panel: Axes, frame: pd.DataFrame) -> None:
    """A line per method."""
    if frame.empty:
        return
    for i, variant in enumerate(in_order(variants(frame))):
        line = only(frame, *variant).sort_values("workers")
        panel.plot(
            line["workers"], line["utilisation_pct"], marker=marker(i), color=COLOURS[i], label=label_of(variant)
        )


def _of(frame: pd.DataFrame, methods: Sequence[str]) -> pd.DataFrame:
    """The rows of these methods, without clustering."""
    return frame[frame["method"].isin(methods) & ~frame["clustered"]] if len(frame) else frame


def _families(local: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Measured rows by family of settings, named by their pace if that tells them apart."""
    if local.empty:
        return []
    groups = [group for _, group in local.groupby(["family_conditions", "family"], sort=True)]
    paces = [group["pace"].iloc[0] for group in groups]
    alike = len(set(paces)) < len(groups)
    long = [textwrap.fill(group["family_conditions"].iloc[0], 44) for group in groups]
    return list(zip(long if alike else paces, groups, strict=True))


def _set_title(panel: Axes, title: str, pad: float) -> None:
    """In small type if it takes several lines."""
    text = textwrap.fill(title, 44)
    panel.set_title(text, pad=pad, fontsize=6 if "\n" in text else 9)
