"""The stages of a training step, each in one place: what a letter means, where it runs and what it touches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """What a stage letter means. ``group``: the process group its collective runs on, None for local work.

    ``reads`` and ``writes``: resources, with ``-1`` for the slot of the batch before.
    """

    title: str
    lane: str
    category: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    per_micro_batch: bool = False
    group: str | None = None


STAGES: Mapping[str, Stage] = {
    "P": Stage("data prefetch", "input", "input", (), ("input",)),
    "H": Stage("data H2D", "copy", "lookup", ("input",), ("batch",)),
    "K": Stage("key routing", "keys", "lookup", ("input", "plan-1"), ("plan",), group="keys"),
    "R": Stage("embedding retrieval", "rows", "lookup", ("plan", "table"), ("buffer",)),
    "S": Stage("dual-buffer synchronisation", "compute", "update", ("plan", "buffer-1"), ("buffer",)),
    "E": Stage("embedding All2All", "all2all", "communication", ("plan", "buffer"), ("received",), True, "all2all"),
    # "module": while F runs, the model's modules hold the micro-batch at hand.
    "F": Stage(
        "dense forward", "compute", "dense", ("batch", "plan", "received", "dense"), ("activation", "module"), True
    ),
    "B": Stage(
        "dense backward",
        "compute",
        "dense",
        ("batch", "plan", "received", "activation", "dense"),
        ("gradient", "dense_gradient"),
        True,
    ),
    "G": Stage("gradient All2All", "all2all", "communication", ("plan", "gradient"), ("accumulator",), True, "all2all"),
    # Tables that are replicated over groups of ranks: what U needs of the other groups, or the replicas made equal.
    "D": Stage(
        "replica synchronisation", "replicas", "communication", ("plan", "arrived"), ("accumulator",), True, "replicas"
    ),
    "A": Stage("dense AllReduce", "allreduce", "dense_sync", ("plan",), ("dense_gradient",), group="allreduce"),
    "U": Stage("sparse update", "compute", "update", ("plan",), ("accumulator", "buffer")),
    "O": Stage("dense optimizer step", "compute", "update", ("batch", "plan"), ("dense_gradient", "dense")),
    "W": Stage("write-back", "rows", "lookup", ("plan", "buffer"), ("table",)),
}

#: How many slots a resource has by default; ``global`` state has one that all batches share.
#: Batch rings turn with the batch, micro rings with the micro-batch (counted across batches).
BATCH_RINGS = {"input": 3, "batch": 4, "plan": 4, "buffer": 2, "accumulator": 2}
MICRO_RINGS = {"received": 3, "activation": 1, "gradient": 3, "arrived": 3}
GLOBALS = ("table", "dense", "dense_gradient", "module")
