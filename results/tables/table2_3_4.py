"""Tables II, III and IV: published, simulated and measured side by side."""

from __future__ import annotations

from collections.abc import Sequence

from nestpipe.measurement.record import Record
from results.artefacts import Artefact, Table
from results.experiments.part_names import FOUR, GPU, NPU, TWO
from results.frames.labels import Variant
from results.sources import Sources
from results.tables.figure_notes import note_mismatches, note_table, notes_of
from results.tables.ladder import out_of_order
from results.tables.paper_inconsistencies import paper_inconsistencies
from results.tables.reasons import why_cell
from results.tables.side_by_side import (
    COMMUNICATION,
    EXPOSED_COMMUNICATION,
    LOOKUP,
    QPS,
    SCALING,
    SPEEDUP,
    STEP,
    TOTAL,
    compared,
    joined,
    measured_cells,
    mismatches,
    published_cells,
    side_by_side,
    simulated_cells,
)

_READ = (
    "Error: simulated against published; rounding: half a unit of the last printed digit. [N]: from public notes on "
    "the paper, not printed in it. Measured: medians over steps, in brackets the quartiles (speed-ups: the range over "
    "interleaved rounds), means over ranks."
)
_SCALE = (
    "Measured milliseconds belong to small models on this machine's processes, not to the paper's clusters: only "
    "ratios can be compared. TorchRec (serial) is what the paper's numbers call TorchRec: nothing hidden; real "
    "torchrec hides key routing already. Real torchrec exchanges by gloo's all_to_all_single, which runs nearly "
    "half-duplex over shaped links; the engine's exchange posts its receives first and does not."
)


#: The paper's order, slowest first.
_ORDER = tuple(Variant(method) for method in ("serial", "2d-sp", "uniemb", "nestpipe"))


def table2(sources: Sources) -> Artefact:
    """RQ1: step latency, speed-up, exposed lookup and exposed communication."""
    metrics = (STEP, SPEEDUP, LOOKUP, COMMUNICATION)
    published = sources.published_numbers()
    rows = published[published["where"] == "II"]
    cells = joined(
        published_cells(rows[rows["cluster"] == "NPU"], metrics),
        simulated_cells([r for r in sources.of(NPU) if r.workers == 1536], metrics),
        measured_cells(sources.steps(TWO), metrics),
    )
    cells = compared(cells, metrics)
    main = side_by_side(
        "table2",
        "Table II, NPU cluster, 1,536 workers",
        f"Simulated: profile npu-1536-industrial. {_READ} {_SCALE} Lookup of published and simulated pipelines holds "
        "the hand-over between buffers, measured lookup does not (it is part of the update). Measured NestPipe runs "
        "without clustering unless the row says so; the paper's has it.",
        cells,
        metrics,
    )
    gpu_cells = joined(
        published_cells(rows[rows["cluster"] == "GPU"], metrics), simulated_cells(sources.of(GPU), metrics)
    )
    gpu_cells = compared(gpu_cells, metrics)
    gpu = side_by_side(
        "table2-gpu",
        "Table II, GPU cluster, KuaiRand-27K, 128 workers",
        "Simulated: profile gpu-128-kuairand, made from the one published row, which therefore matches by "
        f"construction. {_READ}",
        gpu_cells,
        metrics,
    )
    notes = notes_of(sources, "II")
    found = [
        *mismatches(main.title, cells, why_cell),
        *mismatches(gpu.title, gpu_cells, why_cell),
        *note_mismatches(notes, "Table II"),
        *out_of_order(sources.steps(TWO), _ORDER, "Table II, measured here"),
        *paper_inconsistencies(published),
    ]
    return Artefact(
        "table2",
        "Table II: end-to-end efficiency (RQ1)",
        _filled(main, gpu, note_table(notes, "table2-notes", "Table II: ablations, from notes")),
        mismatches=tuple(found),
        missing=sources.missing(TWO, NPU, GPU),
    )


def table3(sources: Sources) -> Artefact:
    """RQ3: QPS, speed-up and scaling efficiency by number of workers."""
    metrics = (QPS, SPEEDUP, SCALING)
    published = sources.published_numbers()
    methods = ("serial", "2d-sp", "uniemb", "nestpipe")
    cells = joined(
        published_cells(published[published["where"] == "III"], metrics),
        simulated_cells(_only(sources.of(NPU), methods), metrics, base_workers=128),
    )
    cells = compared(cells, metrics, workers=True)
    main = side_by_side(
        "table3",
        "Table III, NPU cluster",
        f"Scaling efficiency: QPS per worker against 128 workers. {_READ}",
        cells,
        metrics,
        workers=True,
    )
    tables = [main]
    local = measured_cells(sources.steps(TWO, FOUR), metrics, base_workers=2, conditions="family_conditions")
    if len(local):
        tables.append(
            side_by_side(
                "table3-measured",
                "Table III on this machine",
                f"Real processes; scaling efficiency against 2 workers. {_READ} {_SCALE}",
                compared(local, metrics, workers=True),
                metrics,
                workers=True,
            )
        )
    return Artefact(
        "table3",
        "Table III: scalability (RQ3)",
        _filled(*tables),
        mismatches=tuple(mismatches(main.title, cells, why_cell)),
        missing=sources.missing(NPU, TWO, FOUR),
    )


def table4(sources: Sources) -> Artefact:
    """RQ5: NestPipe with two-dimensional sparse parallelism."""
    metrics = (TOTAL, EXPOSED_COMMUNICATION, QPS, SCALING)
    published = sources.published_numbers()
    methods = ("serial", "2d-sp", "nestpipe", "nestpipe+2d-sp")
    wide = [r for r in _only(sources.of(NPU), methods) if r.workers in (128, 1536)]
    simulated = simulated_cells(wide, metrics, base_workers=128)
    steps = sources.steps(FOUR)
    cells = joined(
        published_cells(published[published["where"] == "IV"], metrics),
        simulated[simulated["workers"] == 1536],
        measured_cells(steps[steps["method"].isin(methods)], metrics[:3]),
    )
    cells = compared(cells, metrics)
    main = side_by_side(
        "table4",
        "Table IV, NPU cluster, 1,536 workers",
        f"Simulated: profile npu-1536-industrial, 4 replica groups. {_READ} {_SCALE} Measured: 4 ranks in 2 replica "
        "groups; their scaling is in Table III on this machine, for the methods that 2 ranks can run.",
        cells,
        metrics,
    )
    return Artefact(
        "table4",
        "Table IV: orthogonality with 2D-SP (RQ5)",
        _filled(main),
        mismatches=tuple(mismatches(main.title, cells, why_cell)),
        missing=sources.missing(NPU, FOUR),
    )


def _only(records: Sequence[Record], methods: Sequence[str]) -> list[Record]:
    return [r for r in records if r.method in methods]


def _filled(*tables: Table) -> tuple[Table, ...]:
    return tuple(table for table in tables if len(table.frame))
