"""The registry of training methods, filled by entry points. Running, checking, pricing and reporting all use it.

A method from another package needs one object of type ``Method`` and a line in the package's metadata:

    [project.entry-points."nestpipe.methods"]
    my-method = "my_package.my_module:METHOD"

Nothing here imports torch until a trainer is built, so a module that defines a method should not import it either.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nestpipe.config import ConfigError, RunConfig
from nestpipe.schedule.frozen_window import fwp_only
from nestpipe.schedule.operations import MAX_MICRO_BATCHES, Schedule
from nestpipe.schedule.templates import dbp_only, nestpipe, serial
from nestpipe.schedule.text import load

if TYPE_CHECKING:
    from nestpipe.trainer import DenseOptimizer, ModelSpec, SparseOptimizer, Trainer


class UnknownMethod(ValueError):
    """No method of that name, or one that cannot be loaded; the message says what to do or lists the known ones."""


@dataclass(frozen=True)
class MethodOptions:
    """A run's options for methods that replicate tables, and its sparse update rule, because marks depend on it."""

    replica_groups: int = 2
    """Groups of ranks, each with a whole copy of the tables, for methods that replicate tables (2d-sp)."""
    sync_interval: int = 1
    """Average 2D-SP's replicas every this many batches."""
    sparse_optimizer: str = "rowwise_adagrad"


MakeSchedule = Callable[[int, MethodOptions], Schedule]
#: (method, model, sparse and dense optimizer, seed, micro-batches) -> Trainer.
MakeTrainer = Callable[["Method", "ModelSpec", "SparseOptimizer", "DenseOptimizer", int, int], "Trainer"]


@dataclass(frozen=True)
class PricedAs:
    """The schedule that the cost model times instead of a method's own. ``reason``: why, in whole sentences."""

    make_schedule: Callable[[int], Schedule]
    reason: str


@dataclass(frozen=True)
class Method:
    """A training method: its schedule, how its trainer is made, and what is special about it."""

    name: str
    summary: str
    make_schedule: MakeSchedule
    """(micro-batches, options) -> Schedule; read it through ``schedule``."""
    make_trainer: MakeTrainer
    """How a trainer is made; use it through ``build``."""
    paper_method: str | None = None
    """The method of the paper whose numbers this one's are compared with."""
    observed: bool = False
    """Whether the order of a run is taken from its trace and the schedule only declares it (foreign pipelines)."""
    fixed_micro_batches: int | None = None
    """Micro-batches per batch; None if the caller chooses."""
    takes_micro_batches: bool = True
    """Whether the caller may ask for NAME(8)."""
    reshards: bool = True
    """Whether a checkpoint can be resumed with another number of ranks."""
    needs: tuple[str, ...] = ()
    """Packages that training needs beyond torch."""
    base: str = "serial"
    """The method that this one is a variant of. What this one hides is measured against it."""
    priced_as: PricedAs | None = None
    """What the cost model times if that is not the method's own schedule."""
    not_priced: str = ""
    """Why the cost model cannot price it; empty if it can."""
    cannot_train: Callable[[int, str], str] | None = None
    """(embedding dim, sparse optimizer) -> why it cannot train those, empty if it can."""
    options: MethodOptions = MethodOptions()

    def with_options(self, options: MethodOptions) -> Method:
        return replace(self, options=options)

    def micro_batches_of(self, asked: int) -> int:
        """Micro-batches per batch if the caller asks for ``asked``."""
        return self.fixed_micro_batches or asked

    def schedule(self, micro_batches: int) -> Schedule:
        """What is run, checked and drawn, with ``micro_batches_of(micro_batches)`` micro-batches."""
        return _made(self.make_schedule, self.micro_batches_of(micro_batches), self.options)

    def priced_schedule(self, micro_batches: int) -> Schedule:
        """What the cost model times: ``schedule``, unless ``priced_as`` says otherwise."""
        if self.priced_as is None:
            return self.schedule(micro_batches)
        return _made(self.priced_as.make_schedule, self.micro_batches_of(micro_batches))

    @property
    def replicated(self) -> bool:
        """Whether tables are replicated over groups of ranks: the schedule has a stage D."""
        return any(op.ref.stage == "D" for op in self.schedule(1).ops)

    @property
    def why_not_priced(self) -> str:
        """Why the cost model cannot price it; empty if it can."""
        if not self.not_priced and any("lossy" in op.marks for op in self.schedule(1).ops):
            return "the cost model does not know what reduced precision saves"
        return self.not_priced

    def why_it_cannot_train(self, embedding_dim: int, sparse_optimizer: str) -> str:
        """The reason in one line; empty if it can."""
        if missing := self.missing_packages():
            return f"needs the package '{missing[0]}', which is not installed: pip install 'nestpipe[all]'"
        return self.cannot_train(embedding_dim, sparse_optimizer) if self.cannot_train else ""

    def missing_packages(self) -> list[str]:
        """The packages in ``needs`` that are not installed here."""
        return [package for package in self.needs if find_spec(package) is None]

    def build(
        self, spec: ModelSpec, sparse: SparseOptimizer, dense: DenseOptimizer, seed: int, micro_batches: int
    ) -> Trainer:
        """A trainer on this rank. Collective if there are several ranks."""
        return self.make_trainer(self, spec, sparse, dense, seed, self.micro_batches_of(micro_batches))


@lru_cache(maxsize=256)
def _made(make: Callable[..., Schedule], *arguments: object) -> Schedule:
    return make(*arguments)


def engine_trainer(
    method: Method,
    spec: ModelSpec,
    sparse: SparseOptimizer,
    dense: DenseOptimizer,
    seed: int,
    micro_batches: int,
    overlap: bool = True,
) -> Trainer:
    """``make_trainer`` of a method that the engine runs. Without ``overlap`` it needs no threads."""
    from nestpipe.engine.engine import Engine, make_lanes  # imports torch, which only training needs

    groups = method.options.replica_groups if method.replicated else 1
    schedule = method.schedule(micro_batches)
    return Engine(schedule, spec, sparse, dense, seed, make_lanes(overlap), replica_groups=groups)


def scheduled_method(
    name: str,
    summary: str,
    make: Callable[[int], Schedule],
    paper_method: str | None = None,
    micro_batches: int | None = None,
    overlap: bool = True,
    priced_as: PricedAs | None = None,
) -> Method:
    """A method that the engine runs. It needs only ``make``, which turns a number of micro-batches into a schedule.

    ``micro_batches`` fixes that number. Without ``overlap`` the engine needs no threads.
    """
    return Method(
        name,
        summary,
        lambda chosen, _: make(chosen),
        engine_trainer if overlap else partial(engine_trainer, overlap=False),
        paper_method,
        fixed_micro_batches=micro_batches,
        takes_micro_batches=micro_batches is None,
        priced_as=priced_as,
    )


SERIAL = replace(
    scheduled_method(
        "serial",
        "unpipelined synchronous training, one micro-batch, nothing hidden; serial(N): N micro-batches",
        serial,
        "TorchRec",
        micro_batches=1,
        overlap=False,
    ),
    takes_micro_batches=True,
)
NESTPIPE = scheduled_method("nestpipe", "dual-buffer and frozen-window pipelining", nestpipe, "NestPipe")
DBP_ONLY = scheduled_method(
    "dbp-only", "only dual-buffer pipelining: lookups hidden", lambda _: dbp_only(), "DBP-only", 1
)
FWP_ONLY = scheduled_method("fwp-only", "only frozen-window pipelining: exchanges hidden", fwp_only, "FWP-only")
BUILT_IN = {method.name: method for method in (SERIAL, NESTPIPE, DBP_ONLY, FWP_ONLY)}


def known_methods() -> list[str]:
    """Names of all available methods, built in and from installed packages."""
    return sorted({*BUILT_IN, *(entry.name for entry in metadata.entry_points(group="nestpipe.methods"))})


def find_method(name: str) -> Method:
    """The method called ``name``; ``serial(8)`` fixes the number of micro-batches.

    Raises UnknownMethod, listing the known ones, or naming an entry point that cannot be loaded.
    """
    match = re.fullmatch(r"([A-Za-z0-9_+-]+?)(?:\((\d+)\))?", name.strip())
    plain, micro_batches = (match[1], match[2]) if match else (name, None)
    method = BUILT_IN.get(plain) or _from_entry_point(plain, name)
    if micro_batches is None:
        return method
    chosen = int(micro_batches)
    if chosen > MAX_MICRO_BATCHES:
        raise UnknownMethod(f"'{name}': micro-batches must be at most {MAX_MICRO_BATCHES}")
    if chosen < 1 or not method.takes_micro_batches:
        raise UnknownMethod(f"'{name}': {method.name} cannot run {micro_batches} micro-batches")
    paper = method.paper_method if chosen == method.micro_batches_of(chosen) else None
    return replace(method, name=f"{method.name}({chosen})", paper_method=paper, fixed_micro_batches=chosen)


def _from_entry_point(plain: str, name: str) -> Method:
    entries = {entry.name: entry for entry in metadata.entry_points(group="nestpipe.methods")}
    if plain not in entries:
        raise UnknownMethod(f"unknown method '{name}'; choose one of {', '.join(known_methods())}")
    entry = entries[plain]
    try:
        method = entry.load()
    except (Exception, SystemExit) as error:  # whatever a foreign module raises while it is imported
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnknownMethod(f"method '{plain}' ({entry.value}) cannot be loaded: {what}") from error
    if not isinstance(method, Method):
        found = type(method).__name__
        raise UnknownMethod(f"method '{plain}' ({entry.value}) is of type {found}, not a nestpipe Method")
    return method


def method_from_file(path: str | Path) -> Method:
    """The schedule in a file, in text form, as a method. Raises ScheduleError."""
    found = load(path)
    return scheduled_method(found.name, f"the schedule in {path}", lambda _: found, micro_batches=found.micro_batches)


def methods_of(config: RunConfig) -> list[Method]:
    """The methods that ``config`` names, with its options. Raises UnknownMethod, or ConfigError for a method that
    cannot run with it."""
    options = MethodOptions(config.replica_groups, config.sync_interval, config.optimizer.sparse_optimizer)
    methods = [find_method(name).with_options(options) for name in config.method_names]
    for method in methods:
        require_equal_groups(method, config.workers)
        why = method.why_it_cannot_train(config.model.embedding_dim, config.optimizer.sparse_optimizer)
        if why:
            raise ConfigError(f"{method.name}: {why}")
    return methods


def require_equal_groups(method: Method, workers: int) -> None:
    """Raises ConfigError if the workers cannot be split into the replica groups of ``method``."""
    groups = method.options.replica_groups
    if method.replicated and workers % groups:
        raise ConfigError(f"--workers {workers} cannot be split into --replica-groups {groups} of equal size")
