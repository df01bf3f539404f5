"""Why numbers that should agree do not: every known reason, and what is said if none is known."""

from __future__ import annotations

from collections.abc import Mapping

#: Simulated cells of Tables II to IV: (metrics, methods or () for any, reason). The first that fits counts.
_CELLS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        ("exposed lookup",),
        ("uniemb",),
        "The model has one hand-over time for every pipeline; the paper prints two (36.21 and 30.19 ms). What UniEmb "
        "does there that NestPipe does not is not public.",
    ),
    (
        ("exposed lookup",),
        ("nestpipe", "nestpipe+2d-sp"),
        "The model has one hand-over time for every pipeline; the paper prints two (36.21 and 30.19 ms).",
    ),
    (
        ("exposed communication",),
        ("nestpipe", "nestpipe+2d-sp"),
        "The model exposes exactly 1/N of the All2All with N = 8; the paper's share is 13.0 %. The first and last "
        "micro-batches may be larger, or N may not be exactly 8.",
    ),
    (
        ("exposed communication",),
        ("serial",),
        "In the model, C(n) grows linearly and is fitted to all scales at once.",
    ),
    (
        ("exposed communication", "total communication"),
        ("2d-sp", "nestpipe+2d-sp"),
        "The model has one fitted time for replica synchronisation. Group count and its growth are not published.",
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
        "The model has one ratio of lookup to TorchRec's lookup at every scale, and the paper's column was computed "
        "from numbers other than its printed QPS.",
    ),
    (("scaling efficiency",), (), "The paper's column was computed from numbers other than its printed QPS."),
)

#: Points that notes on the paper name: (metric, the note's setting, or its workers if no setting fits) -> reason.
_NOTES: Mapping[tuple[str, str | int], str] = {
    ("comm_share", 128): "9.2 % of the tables' 2562 ms is 236 ms; the time of All2All on few workers is the "
    "model's least certain.",
    (
        "lookup_share",
        128,
    ): "Not explained: 24.4 % of the tables' 2562 ms is 625 ms, but TorchRec minus UniEmb gives 593.",
    ("exposed_ratio", "micro_batch=16 clustering=off"): "Not explained: duplication increases the total, but "
    "still only 2 of 64 All2Alls are exposed, which is 3.1 %.",
    (
        "exposed_comm",
        "micro_batch=16 clustering=on",
    ): "Not explained: it is less than 1/32 of the total. The first and last micro-batches may be smaller.",
    (
        "exposed_comm",
        "sequence_length=2048",
    ): "Not explained: twice as many items would give nearly twice as many keys. "
    "The paper's reference length is not published.",
    ("total_comm", "micro_batch=16 clustering=off"): "Key repetition was measured on data other than the paper's.",
}

_FEW_RANKS = "Two and four ranks on one machine say little about hundreds, and the simulator does not have this method."
#: Cells of Table I: (the method that represents the family, column) -> reason.
_DERIVED: Mapping[tuple[str, str], str] = {
    ("torchrec-bf16", "lookup"): "bf16 on the wire shrinks what All2Alls move, not what is looked up. The family "
    "also has compressed tables, but no method here represents them.",
    ("2d-sp", "scalability"): "The paper's own Table III gives 2D-SP 49 % at 1,536 workers, "
    "less than UniEmb's 68 %, yet UniEmb's cell says no. No threshold on efficiency gives both cells. 2D-SP's All2All "
    "scales; its lookup does not.",
    ("torchrec-planner", "communication"): "On one table of a small model the planner's choice moves as many rows as "
    "row-wise sharding does.",
    ("2d-sp", "communication"): "Groups have two ranks here. On small clusters, the replicas' AllReduce of whole "
    "tables outweighs what All2All saves.",
    ("2d-sp", "orthogonal to NestPipe"): "The reason is that of 2D-SP without NestPipe: with two ranks in a group, "
    "keeping replicas equal sends more bytes (replica_bytes of the records) than the All2All saves.",
    ("torchrec-planner", "lookup"): "The value is near the threshold and varies from run to run.",
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
    """The reason for a simulated value that misses a published note. The arguments are as in published.csv."""
    return _NOTES.get((metric, setting)) or _NOTES.get((metric, workers)) or "The error is small; no cause is known."


def why_derived(method: str, column: str) -> str:
    """The reason for a cell of Table I that differs from the printed one."""
    return _DERIVED.get((method, column), "Not explained.")
