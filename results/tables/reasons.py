"""Why numbers that should agree do not: every reason that is known, and what is said if none is."""

from __future__ import annotations

from collections.abc import Mapping

#: Simulated cells of Tables II to IV: (metrics, methods; empty: any) -> reason. The first that fits counts.
_CELLS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        ("exposed lookup",),
        ("uniemb",),
        "One hand-over time serves every pipeline in the model; the paper prints two (36.21 and 30.19 ms). What UniEmb "
        "does beyond NestPipe there is not public.",
    ),
    (
        ("exposed lookup",),
        ("nestpipe", "nestpipe+2d-sp"),
        "One hand-over time serves every pipeline in the model; the paper prints two (36.21 and 30.19 ms).",
    ),
    (
        ("exposed communication",),
        ("nestpipe", "nestpipe+2d-sp"),
        "The model exposes exactly 1/N of the All2All with N = 8; the paper's share is 13.0 %: first and last "
        "micro-batches may be larger, or N not quite 8.",
    ),
    (
        ("exposed communication",),
        ("serial",),
        "C(n) grows linearly in the model and is fitted to all scales at once.",
    ),
    (
        ("exposed communication", "total communication"),
        ("2d-sp", "nestpipe+2d-sp"),
        "Replica synchronisation is one fitted time; group count and its growth are not published.",
    ),
    (
        ("QPS",),
        (),
        "QPS is printed with two decimals and does not always follow from the printed latency (see the paper's own "
        "inconsistencies).",
    ),
    (
        ("scaling efficiency",),
        ("2d-sp", "nestpipe+2d-sp"),
        "The model has one lookup relative to TorchRec's at every scale, and the paper's column was computed from "
        "other numbers than its printed QPS.",
    ),
    (("scaling efficiency",), (), "The paper's column was computed from other numbers than its printed QPS."),
)

#: Points that notes on the paper name: (metric, the note's setting, or its workers if no setting fits) -> reason.
_NOTES: Mapping[tuple[str, str | int], str] = {
    ("comm_share", 128): "9.2 % of the tables' 2562 ms is 236 ms; All2All of few workers is the model's least certain "
    "time.",
    ("lookup_share", 128): "Not explained: 24.4 % of the tables' 2562 ms is 625 ms, TorchRec minus UniEmb gives 593.",
    ("exposed_ratio", "micro_batch=16 clustering=off"): "Not explained: duplication grows the total, but still 2 of 64 "
    "All2Alls are exposed, 3.1 %.",
    ("exposed_comm", "micro_batch=16 clustering=on"): "Not explained: less than 1/32 of the total; first and last "
    "micro-batch may be smaller.",
    ("exposed_comm", "sequence_length=2048"): "Not explained: twice the items would be nearly twice the keys; the "
    "paper's reference length is not published.",
    ("total_comm", "micro_batch=16 clustering=off"): "Key repetition was measured on other data than the paper's.",
}

_FEW_RANKS = "Two and four ranks of one machine say little about hundreds, and the simulator has no such method."
#: Cells of Table I: (the method that represents the family, column) -> reason.
_DERIVED: Mapping[tuple[str, str], str] = {
    ("torchrec-bf16", "lookup"): "bf16 on the wire shrinks what All2Alls move, not what is looked up: compressed "
    "tables, which the family also has, are not among the representatives here.",
    ("2d-sp", "scalability"): "The paper's own Table III gives 2D-SP 49 % at 1,536 workers, "
    "less than UniEmb's 68 %, whose cell says no: no threshold on efficiency gives both. 2D-SP's All2All scales; its "
    "lookup does not.",
    ("torchrec-planner", "communication"): "On one table of a small model the planner's choice moves as many rows as "
    "row-wise sharding does.",
    ("2d-sp", "communication"): "Groups of two ranks: the replicas' AllReduce of whole tables outweighs what All2All "
    "saves on small clusters.",
    ("2d-sp", "orthogonal to NestPipe"): "As for 2D-SP alone: with two ranks in a group, keeping replicas equal sends "
    "more (replica_bytes of the records) than the All2All saves.",
    ("torchrec-planner", "lookup"): "Near the threshold, and it varies from run to run.",
    ("torchrec-bf16", "scalability"): _FEW_RANKS,
    ("torchrec-planner", "scalability"): _FEW_RANKS,
}


def why_cell(metric: str, method: str) -> str:
    """The reason for a simulated cell that is off. ``metric``: the title of a ``Metric``."""
    for metrics, methods, reason in _CELLS:
        if metric in metrics and (not methods or method in methods):
            return reason
    return "Not explained by the model."


def why_note(metric: str, setting: str, workers: int) -> str:
    """The reason for a simulated value that misses a published note. All arguments as in published.csv."""
    return _NOTES.get((metric, setting)) or _NOTES.get((metric, workers)) or "Small; no cause is known."


def why_derived(method: str, column: str) -> str:
    """The reason for a cell of Table I that differs from the printed one."""
    return _DERIVED.get((method, column), "not explained")
