"""The registry of training methods, filled by entry points.

A method from outside needs one object of type ``Method`` and a line in its package's metadata:

    [project.entry-points."nestpipe.methods"]
    my-method = "my_package.my_module:METHOD"
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata

from nestpipe import schedule
from nestpipe.engine.engine import Engine
from nestpipe.engine.lanes import OneAtATime
from nestpipe.engine.thread_lanes import ThreadLanes
from nestpipe.schedule.operations import MAX_MICRO_BATCHES, Schedule
from nestpipe.trainer import DenseOptimizer, ModelSpec, SparseOptimizer, Trainer

Build = Callable[[ModelSpec, SparseOptimizer, DenseOptimizer, int, int], Trainer]


class UnknownMethod(ValueError):
    """No method of that name, or one that cannot be had; the message says what to do or lists the known ones."""


@dataclass(frozen=True)
class MethodOptions:
    """What a run chooses for methods that replicate tables; also the sparse update rule, since marks depend on it."""

    replica_groups: int = 2
    """Groups of ranks that hold a whole copy of the tables each, for 2D-SP alone and with NestPipe."""
    sync_interval: int = 1
    """Batches from one averaging of 2D-SP's replicas to the next."""
    sparse_optimizer: str = "rowwise_adagrad"


@dataclass(frozen=True)
class Method:
    """``schedule``: micro-batches -> Schedule. ``build``: (spec, optimizers, seed, micro-batches) -> Trainer.

    ``paper_method``: the method of the paper whose numbers stand beside this one's. ``observed``:
    the schedule is declared and the order of a run is taken from its trace (foreign pipelines).
    ``micro_batches``: fixed number, None where the caller chooses. ``adapt``: the method under other options.
    ``refuse``: (embedding dim, sparse optimizer) -> why it cannot train those, empty where it can.
    """

    name: str
    summary: str
    schedule: Callable[[int], Schedule]
    build: Build
    paper_method: str | None = None
    observed: bool = False
    micro_batches: int | None = None
    adapt: Callable[[Method, MethodOptions], Method] | None = None
    refuse: Callable[[int, str], str] | None = None

    def under(self, options: MethodOptions) -> Method:
        """This method as ``options`` have it; itself where they do not matter to it."""
        return self.adapt(self, options) if self.adapt else self


def scheduled_method(
    name: str,
    summary: str,
    make: Callable[[int], Schedule],
    paper_method: str | None = None,
    micro_batches: int | None = None,
    overlap: bool = True,
) -> Method:
    """A method that the engine runs: all it needs is its schedule. Without ``overlap`` it needs no threads."""

    def build(
        spec: ModelSpec, sparse: SparseOptimizer, dense: DenseOptimizer, seed: int, micro_batches: int
    ) -> Trainer:
        lanes = ThreadLanes if overlap else OneAtATime
        return Engine(make(micro_batches), spec, sparse, dense, seed, lanes)

    return Method(name, summary, make, build, paper_method, micro_batches=micro_batches)


SERIAL = scheduled_method(
    "serial",
    "unpipelined synchronous training, one micro-batch, nothing hidden; serial(N): N micro-batches",
    schedule.serial,
    "TorchRec",
    micro_batches=1,
    overlap=False,
)
NESTPIPE = scheduled_method("nestpipe", "dual-buffer and frozen-window pipelining", schedule.nestpipe, "NestPipe")
DBP_ONLY = scheduled_method(
    "dbp-only", "dual-buffer pipelining alone: lookups hidden", lambda _: schedule.dbp_only(), "DBP-only", 1
)
FWP_ONLY = scheduled_method(
    "fwp-only", "frozen-window pipelining alone: exchanges hidden", schedule.fwp_only, "FWP-only"
)
BUILT_IN = {method.name: method for method in (SERIAL, NESTPIPE, DBP_ONLY, FWP_ONLY)}


def known_methods() -> list[str]:
    """Names of all methods that can be asked for, built in and from installed packages."""
    return sorted({*BUILT_IN, *(entry.name for entry in metadata.entry_points(group="nestpipe.methods"))})


def find_method(name: str) -> Method:
    """The method called ``name``; ``serial(8)`` fixes the number of micro-batches.

    Raises UnknownMethod, listing the known ones, or naming an entry point that cannot be loaded.
    """
    match = re.fullmatch(r"([A-Za-z0-9_+-]+?)(?:\((\d+)\))?", name.strip())
    plain, micro_batches = (match[1], match[2]) if match else (name, None)
    method = BUILT_IN.get(plain)
    if method is None:
        entries = {entry.name: entry for entry in metadata.entry_points(group="nestpipe.methods")}
        if plain not in entries:
            raise UnknownMethod(f"unknown method '{name}', one of {', '.join(known_methods())}")
        try:
            method = entries[plain].load()
        except (Exception, SystemExit) as error:  # whatever a foreign module raises as it is imported
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise UnknownMethod(f"method '{plain}' ({entries[plain].value}) cannot be loaded: {what}") from error
        if not isinstance(method, Method):
            found = type(method).__name__
            raise UnknownMethod(f"method '{plain}' ({entries[plain].value}) is of type {found}, not a nestpipe Method")
    if micro_batches is None:
        return method
    if int(micro_batches) > MAX_MICRO_BATCHES:
        raise UnknownMethod(f"'{name}': micro-batches must be at most {MAX_MICRO_BATCHES}")
    if method.observed or method.name in ("dbp-only", "uniemb") or int(micro_batches) < 1:
        raise UnknownMethod(f"'{name}': {method.name} cannot run {micro_batches} micro-batches")
    chosen = int(micro_batches)
    title = f"{method.name}({chosen})"
    paper = method.paper_method if chosen == (method.micro_batches or chosen) else None
    return replace(method, name=title, paper_method=paper, micro_batches=chosen)
