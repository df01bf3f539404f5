"""Figures 9 and 10: what the micro-batch and the model's sizes do to a step."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import pandas as pd

from results.artefacts import Artefact, Table
from results.experiments.part_names import MICRO_BATCHES, NPU_MICRO_BATCHES, NPU_SIZES, SIZES
from results.figures.style import COLOURS, figure, marker, parts_legend, picture, stacked_bars
from results.frames.frames import measured_medians, step_frame
from results.frames.labels import in_order, label_of, labelled, variants, without_count
from results.sources import Sources
from results.tables.figure_notes import note_mismatches, note_table, notes_of
from results.tables.side_by_side import CELLS

_SWEEPS = {"embedding_dim": "embedding dim", "dense_layers": "dense layers", "sequence_length": "sequence length"}
_BARS = ("serial", "nestpipe")


def fig9(sources: Sources) -> Artefact:
    """Micro-batch size against step latency and exposed communication."""
    simulated, local = (_windowed(f) for f in _frames(sources, NPU_MICRO_BATCHES, MICRO_BATCHES))
    notes = sources.published_numbers()
    notes = notes[(notes["where"] == "9") & (notes["metric"] == "exposed_ratio")]
    made, axes = figure(4 if len(local) else 2)
    _curves(axes[0], simulated, "step_ms", "simulated: 1,536 workers", "step latency, ms")
    _curves(axes[1], simulated, "exposed_pct", "simulated: 1,536 workers", "exposed share of communication, %")
    sizes = [int(dict(pair.split("=") for pair in text.split())["micro_batch"]) for text in notes["setting"]]
    axes[1].plot(sizes, notes["value"], "D", color="black", fillstyle="none", label="published [N], no clustering")
    axes[1].legend()
    if len(local):
        where = local["conditions"].iloc[0]
        _curves(axes[2], local, "step_ms", f"measured: {where}", "step latency, ms")
        _curves(axes[3], local, "exposed_pct", f"measured: {where}", "exposed share of communication, %")
    found = notes_of(sources, "9")
    alt = "Step latency and the exposed share of communication fall as the batch is cut into more micro-batches."
    return Artefact(
        "fig9",
        "Figure 9: micro-batch size (RQ4)",
        (
            note_table(found, "fig9", "Figure 9: published points"),
            *_both("fig9", "Figure 9: the numbers", simulated, local, ("micro_batch", "clustering")),
        ),
        (
            picture(
                "fig9",
                "NestPipe. Simulated: batch 512; without clustering keys repeat between micro-batches as the router "
                "measured it on KuaiRand-like data. Measured: real processes, medians.",
                alt,
                made,
            ),
        ),
        mismatches=tuple(note_mismatches(found, "Figure 9")),
        missing=sources.missing(NPU_MICRO_BATCHES, MICRO_BATCHES),
    )


def _windowed(frame: pd.DataFrame) -> pd.DataFrame:
    """NestPipe by number of micro-batches."""
    return frame[frame["method"].map(without_count) == "nestpipe"] if len(frame) else frame


def _curves(panel: Any, frame: pd.DataFrame, metric: str, title: str, unit: str) -> None:
    for i, (clustering, group) in enumerate(frame.groupby("clustering", sort=True) if len(frame) else ()):
        line = group.sort_values("micro_batch")
        name = "with clustering" if clustering == "on" else "without clustering"
        panel.plot(line["micro_batch"], line[metric], marker=marker(i), color=COLOURS[i], label=name)
    panel.set_xscale("log", base=2)
    panel.set_xticks(sorted(set(frame["micro_batch"])) if len(frame) else [])
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_title(textwrap.fill(title, 40), fontsize=7)
    panel.set(xlabel="samples per micro-batch", ylabel=unit, ylim=(0, None))
    if len(frame):
        panel.legend()


def fig10(sources: Sources) -> Artefact:
    """Step latency breakdown by embedding dim, dense layers and sequence length."""
    simulated, local = _frames(sources, NPU_SIZES, SIZES)
    rows = [("simulated: 1,536 workers", simulated)]
    if len(local):
        rows.append((f"measured: {local['conditions'].iloc[0]}", local))
    made, axes = figure(3, height=2.8, rows=len(rows), width=3.2)
    found = notes_of(sources, "10")
    tables = [note_table(found, "fig10", "Figure 10: published points")]
    for r, (title, frame) in enumerate(rows):
        for c, (name, words) in enumerate(_SWEEPS.items()):
            panel = axes[3 * r + c]
            panel.set_title(f"{words}\n{title}", fontsize=7, pad=14)
            sweep = one_dimension(frame, name) if len(frame) else frame
            if not len(sweep):
                continue
            groups = sorted(set(sweep[name]))
            bars = [label_of(variant) for variant in in_order(variants(sweep))]
            parts = {(str(row[name]), row["label"]): row for row in labelled(sweep).to_dict("records")}
            stacked_bars(panel, [str(g) for g in groups], bars, parts, "ms a step")
    parts_legend(made)
    tables += _both("fig10", "Figure 10: the numbers", simulated, local, tuple(_SWEEPS))
    return Artefact(
        "fig10",
        "Figure 10: embedding dim, dense layers, sequence length (RQ4)",
        tuple(tables),
        (
            picture(
                "fig10",
                "Parts of a step that are on its critical path. Simulated: one dimension varied around the reference "
                "(which is assumed: the paper's is not published). Measured: real processes, unpaced, medians.",
                "Stacked bars of step latency for TorchRec and NestPipe by embedding dimension, dense layers and "
                "sequence length, simulated above and measured below.",
                made,
            ),
        ),
        mismatches=tuple(note_mismatches(found, "Figure 10")),
        missing=sources.missing(NPU_SIZES, SIZES),
    )


def one_dimension(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of serial and NestPipe that differ from the most usual sizes in ``name`` at most."""
    frame = frame[frame["method"].isin(_BARS) & ~frame["clustered"]]
    for other in _SWEEPS:
        if other != name and len(frame):
            frame = frame[frame[other] == frame[other].mode().iloc[0]]
    return frame


def _frames(sources: Sources, simulated: str, measured: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Simulated and measured points. The sizes, which a figure's settings differ in, are not part of the conditions."""
    return sources.simulated_means(simulated), measured_medians(step_frame(sources.measured(measured)))


def _both(name: str, title: str, simulated: pd.DataFrame, measured: pd.DataFrame, by: Sequence[str]) -> list[Table]:
    """A table per kind that there is."""
    kinds = {"simulated": simulated, "measured": measured}
    return [_numbers(name, title, frame, kind, by) for kind, frame in kinds.items() if len(frame)]


def _numbers(name: str, title: str, frame: pd.DataFrame, kind: str, by: Sequence[str]) -> Table:
    """Step and exposed parts of every point of a figure, of one kind."""
    columns = {"step_ms": "step", "exposed_lookup_ms": "exposed lookup", "exposed_communication_ms": "exposed comm."}
    cells, rows = [], []
    frame = labelled(frame).sort_values(["conditions", *by, "label"], kind="stable")
    for row in frame.to_dict("records"):
        point = {key.replace("_", " "): str(row[key]) for key in by}
        text = ", ".join(f"{key} {value}" for key, value in point.items())
        rows.append(
            {"conditions": row["conditions"], "method": row["label"], **point}
            | {f"{words} [ms]": f"{row[metric]:,.2f}" for metric, words in columns.items()}
        )
        cells += [
            {
                "metric": f"{words}, {text}",
                "workers": row["workers"],
                "label": row["label"],
                "kind": kind,
                "conditions": row["conditions"],
                "value": row[metric],
                "unit": "ms",
            }
            for metric, words in columns.items()
        ]
    caption = "Measured: medians over steps." if kind == "measured" else "Simulated: on virtual clocks."
    return Table(f"{name}-{kind}", f"{title}, {kind}", caption, pd.DataFrame(rows), pd.DataFrame(cells, columns=CELLS))
