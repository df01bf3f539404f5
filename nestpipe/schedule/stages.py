"""The stages of a training step: everything that a letter means, in one place.

Three parts of a stage are code, so they are elsewhere under the same letter: the checker's rule
(``checker.staleness.RULES``), the engine's function (``engine.stage_functions.StageFunctions``) and the
simulator's price (``simulator.cost.stage_seconds``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeVar

#: What a stage's time is counted as. All but ``dense`` and ``update`` are exposed while the compute lane waits.
CATEGORIES = ("dense", "update", "input", "lookup", "communication", "dense_sync")
#: The lane whose last operation ends a step. Its idle time is the exposed time.
COMPUTE_LANE = "compute"

#: What makes a stage's time vary between workers and batches: the machine, a shard's load, or the samples' length.
Noise = Literal["jitter", "keys", "length"]
#: When the engine needs a schedule to have a stage. ``replicated``: if tables are replicated over groups.
#: ``buffered``: if U updates a buffer and not the table itself.
Required = Literal["always", "replicated", "buffered", "never"]


@dataclass(frozen=True)
class Stage:
    """What a stage letter means. Raises ValueError for an unknown category.

    ``reads`` and ``writes``: resources, with ``-1`` for the slot of the previous batch. ``group``: the process
    group of its collective, None for local work. ``columns``: the width of one operation in the text grid.
    ``units``: the time of a whole batch in the pictures, in an arbitrary unit. ``noise``: what its simulated time
    varies with.
    """

    title: str
    lane: str
    category: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    per_micro_batch: bool = False
    group: str | None = None
    _: KW_ONLY
    columns: int
    units: int
    noise: tuple[Noise, ...]
    required: Required = "never"

    def __post_init__(self) -> None:
        if self.category not in CATEGORIES:
            raise ValueError(f"stage '{self.title}': category '{self.category}' is not one of {', '.join(CATEGORIES)}")


STAGES: Mapping[str, Stage] = {
    "P": Stage("data prefetch", "input", "input", (), ("input",), columns=3, units=6, noise=(), required="always"),
    "H": Stage("data H2D", "copy", "lookup", ("input",), ("batch",), columns=2, units=3, noise=(), required="always"),
    "K": Stage(
        "key routing",
        "keys",
        "lookup",
        ("input", "plan-1"),
        ("plan",),
        group="keys",
        columns=2,
        units=5,
        noise=("keys",),
        required="always",
    ),
    "R": Stage(
        "embedding retrieval",
        "rows",
        "lookup",
        ("plan", "table"),
        ("buffer",),
        columns=4,
        units=14,
        noise=("keys",),
        required="always",
    ),
    "S": Stage(
        "dual-buffer synchronisation",
        "compute",
        "update",
        ("plan", "buffer-1"),
        ("buffer",),
        columns=1,
        units=1,
        noise=("jitter",),
    ),
    "E": Stage(
        "embedding All2All",
        "all2all",
        "communication",
        ("plan", "buffer"),
        ("received",),
        per_micro_batch=True,
        group="all2all",
        columns=1,
        units=10,
        noise=(),
        required="always",
    ),
    # "module": while F runs, the model's modules hold the current micro-batch.
    "F": Stage(
        "dense forward",
        "compute",
        "dense",
        ("batch", "plan", "received", "dense"),
        ("activation", "module"),
        per_micro_batch=True,
        columns=1,
        units=14,
        noise=("length", "jitter"),
        required="always",
    ),
    "B": Stage(
        "dense backward",
        "compute",
        "dense",
        ("batch", "plan", "received", "activation", "dense"),
        ("gradient", "dense_gradient"),
        per_micro_batch=True,
        columns=2,
        units=28,
        noise=("length", "jitter"),
        required="always",
    ),
    "G": Stage(
        "gradient All2All",
        "all2all",
        "communication",
        ("plan", "gradient"),
        ("accumulator",),
        per_micro_batch=True,
        group="all2all",
        columns=1,
        units=10,
        noise=(),
        required="always",
    ),
    # For tables that are replicated over groups of ranks: fetches what U needs from the other groups, or makes the
    # replicas equal.
    "D": Stage(
        "replica synchronisation",
        "replicas",
        "communication",
        ("plan", "arrived"),
        ("accumulator",),
        per_micro_batch=True,
        group="replicas",
        columns=1,
        units=10,
        noise=(),
        required="replicated",
    ),
    "A": Stage(
        "dense AllReduce",
        "allreduce",
        "dense_sync",
        ("plan",),
        ("dense_gradient",),
        group="allreduce",
        columns=2,
        units=3,
        noise=(),
        required="always",
    ),
    "U": Stage(
        "sparse update",
        "compute",
        "update",
        ("plan",),
        ("accumulator", "buffer"),
        columns=1,
        units=2,
        noise=("keys", "jitter"),
        required="always",
    ),
    "O": Stage(
        "dense optimizer step",
        "compute",
        "update",
        ("batch", "plan"),
        ("dense_gradient", "dense"),
        columns=1,
        units=1,
        noise=("jitter",),
        required="always",
    ),
    "W": Stage(
        "write-back",
        "rows",
        "lookup",
        ("plan", "buffer"),
        ("table",),
        columns=2,
        units=8,
        noise=("keys",),
        required="buffered",
    ),
}

#: ``loss_count``: what a batch's losses are divided by, if the model counts that (``building.counted``).
#: The default number of slots of each ring. A batch ring advances one slot per batch, a micro ring one per
#: micro-batch (counted across batches). Global state has one slot that all batches share.
BATCH_RINGS = {"input": 3, "batch": 4, "plan": 4, "buffer": 2, "accumulator": 2, "loss_count": 2}
MICRO_RINGS = {"received": 3, "activation": 1, "gradient": 3, "arrived": 3}
GLOBALS = ("table", "dense", "dense_gradient", "module")

T = TypeVar("T")


def of_stage(table: Mapping[str, T], letter: str, what: str, where: str) -> T:
    """``table[letter]``. Raises ValueError if it is missing: ``what`` the stage lacks and ``where`` to add it."""
    if letter not in table:
        title = f" ({STAGES[letter].title})" if letter in STAGES else ""
        raise ValueError(f"stage {letter}{title} lacks {what}: add it to {where}")
    return table[letter]
