"""``nestpipe simulate``: step times on clusters that are not available, as records of kind ``simulated``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nestpipe.checker.rules import hidden_accesses
from nestpipe.config import names_in
from nestpipe.measurement.exposed_time import StepTimes
from nestpipe.measurement.provenance import provenance
from nestpipe.measurement.record import Record, metrics_from_times
from nestpipe.methods import SERIAL, Method, UnknownMethod, find_method, known_methods, method_from_file
from nestpipe.schedule.stages import COMPUTE_LANE
from nestpipe.simulator.cost import Cluster, ClusterError, cluster_of
from nestpipe.simulator.key_statistics import unclustered
from nestpipe.simulator.profile import Profile, load_profile, resized
from nestpipe.simulator.step_times import Noise, method_seconds, simulate_steps
from nestpipe.simulator.workload import Workload

#: What ``all`` means: the methods of the paper's tables, in their order, and real torchrec.
ALL = ("serial", "torchrec", "2d-sp", "uniemb", "dbp-only", "fwp-only", "nestpipe", "nestpipe+2d-sp")


@dataclass(frozen=True)
class Scenario:
    """A model on a cluster, as options. None means the profile's value."""

    hardware: str = "npu-1536-industrial"
    """A shipped profile (npu-1536-industrial, gpu-128-kuairand, h100-ib), `local` (see calibrate), or a .toml file."""
    methods: str = "all"
    """Comma-separated methods (your own registered methods and schedule files too), or all: those of the paper."""
    micro_batch: int | None = None
    """Samples per micro-batch, for methods with a frozen window (default: an eighth of the batch; `advise` chooses)."""
    batch_size: int | None = None
    """Samples per worker and step (default, as for the next three: the profile's)."""
    embedding_dim: int | None = None
    """Elements per embedding row."""
    dense_layers: int | None = None
    """Blocks of the dense network."""
    sequence_length: int | None = None
    """Items per sample."""
    clustering: Literal["profile", "off"] = "profile"
    """off: keys repeat between micro-batches as the router measured on unclustered KuaiRand-like data."""
    groups: int | None = None
    """Replica groups of two-dimensional sharding (default: the profile's)."""


@dataclass(frozen=True)
class SimulateConfig(Scenario):
    """Predict step times: schedules on virtual clocks, with a cost model. Nothing is run."""

    workers: str = ""
    """Comma-separated numbers of workers (default: the profile's)."""
    steps: int = 20
    """Steps to report, after the pipeline has filled."""
    noise: Noise = field(default_factory=Noise)
    seed: int = 1
    """Seed of the noise."""


@dataclass(frozen=True)
class Setting:
    """A resolved configuration: what to simulate, and on which hardware."""

    profile: Profile
    workload: Workload
    methods: tuple[Method, ...]
    workers: tuple[int, ...]
    micro_batches: int
    groups: int
    leaves_out: bool = False
    """Whether to leave out methods with replicated tables if there are fewer workers than groups. This is so if nobody
    has asked for methods or groups."""

    def fits(self, method: Method, workers: int) -> bool:
        return not (self.leaves_out and method.replicated and workers < self.groups)

    def cluster(self, method: Method, workers: int) -> Cluster:
        return cluster_of(method, self.profile.hardware, workers, self.groups)


def resolve(config: Scenario, workers: str = "") -> Setting:
    """Look everything up; ``workers`` as in ``SimulateConfig``.

    Raises ValueError (ProfileError, UnknownMethod, ClusterError, WorkloadError) with a message of one line.
    """
    profile = load_profile(config.hardware)
    methods = tuple(priced_methods(config.methods))
    workload = resized(
        profile.workload, config.embedding_dim, config.dense_layers, config.sequence_length, config.batch_size
    )
    if config.clustering == "off":
        workload = unclustered(workload)
    groups = profile.groups if config.groups is None else config.groups
    return Setting(
        profile,
        workload,
        methods,
        worker_counts(workers, profile),
        micro_batches_of(workload, config.micro_batch, profile),
        groups,
        leaves_out=config.methods.strip() == "all" and config.groups is None,
    )


def priced_methods(names: str) -> list[Method]:
    """Methods by comma-separated names, which may be files with a schedule in text form; ``all``: those of ALL.

    Raises UnknownMethod, which lists the known ones, also for a method that the cost model cannot price. Raises
    ScheduleError for a bad file.
    """
    known = known_methods()
    wanted = [name for name in ALL if name in known] if names.strip() == "all" else names_in(names)
    if not wanted:
        raise UnknownMethod(f"no method is named: choose one or more of {', '.join(known)}, or all")
    files = [name for name in wanted if name not in known and Path(name).is_file()]
    methods = [method_from_file(name) if name in files else find_method(name) for name in dict.fromkeys(wanted)]
    for method in methods:
        if why := method.why_not_priced:
            raise UnknownMethod(f"'{method.name}' cannot be simulated: {why}")
    for method in methods:
        plan = method.priced_schedule(method.micro_batches_of(2))
        why_not = hidden_accesses(plan)
        if not any(op.lane == COMPUTE_LANE for op in plan.ops):
            why_not = [f"no operation is on the lane '{COMPUTE_LANE}', so a step has no end; put F, B, U and O there"]
        if why_not:
            raise UnknownMethod(f"'{method.name}' cannot be simulated: {why_not[0]}")
    return methods


def paper_methods() -> dict[str, Method]:
    """The methods of the paper's tables, by the paper's names for them."""
    return {method.paper_method: method for method in priced_methods("all") if method.paper_method}


def worker_counts(text: str, profile: Profile) -> tuple[int, ...]:
    """The numbers in text such as ``128,256``, or the profile's if it is empty. Raises ClusterError."""
    if not text.strip():
        return profile.workers
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ClusterError(f"workers '{text}': expected whole numbers separated by commas, as in 128,256") from None
    if min(counts) < 1:
        raise ClusterError(f"workers '{text}': each must be at least 1")
    return counts


def micro_batches_of(workload: Workload, micro_batch: int | None, profile: Profile) -> int:
    """Micro-batches of a batch. Raises ClusterError for a size that does not divide it."""
    if micro_batch is None:
        usual = profile.reference.micro_batches if profile.reference else 8
        return min(usual, workload.batch_size)
    if micro_batch < 1 or workload.batch_size % micro_batch:
        raise ClusterError(
            f"micro-batch {micro_batch}: must be at least 1 and divide the batch of {workload.batch_size}"
        )
    return workload.batch_size // micro_batch


def simulate(config: SimulateConfig) -> list[Record]:
    """One record of kind ``simulated`` per number of workers and method, in that order. Raises as ``resolve``."""
    if config.steps < 1:
        raise ClusterError(f"steps is {config.steps}; it must be at least 1")
    setting = resolve(config, config.workers)
    # All are made before any is timed, so that what cannot be simulated is reported at once.
    clusters = {
        (workers, method): setting.cluster(method, workers)
        for workers in setting.workers
        for method in setting.methods
        if setting.fits(method, workers)
    }
    origin = provenance()
    records = []
    serial: dict[int, StepTimes] = {}
    for (workers, method), cluster in clusters.items():
        stages = method_seconds(method, cluster, setting.workload, setting.micro_batches)
        times = simulate_steps(method, cluster, stages, setting.micro_batches, config.steps, config.noise, config.seed)
        if method.name == SERIAL.name:
            serial[workers] = times
        records.append(_record(setting, config, method, cluster, stages, times, serial.get(workers), origin))
    return records


def _record(
    setting: Setting,
    config: SimulateConfig,
    method: Method,
    cluster: Cluster,
    stages: Mapping[str, float],
    times: StepTimes,
    serial: StepTimes | None,
    origin: Mapping[str, Any],
) -> Record:
    w = setting.workload
    n = method.micro_batches_of(setting.micro_batches)
    workers, steps = cluster.workers, times.steps
    metrics = metrics_from_times(times, steps, dict.fromkeys(steps, float(w.batch_size * workers)))
    if serial is not None:
        base = float(np.mean(serial.ms["exposed_communication"]))
        if base:
            metrics["exposed_vs_serial"] = [x / base for x in metrics["exposed_communication_ms"]]
    # Rows to and gradients from the other members of a worker's group, all workers together.
    remote = 2 * workers * w.distinct * w.embedding_bytes * (cluster.group_size - 1) / cluster.group_size
    metrics["duplication_factor"] = [w.keys.duplication_at(n)] * len(steps)
    metrics["embedding_bytes"] = [remote * w.keys.duplication_at(n)] * len(steps)
    metrics["minimum_embedding_bytes"] = [remote] * len(steps)
    return Record(
        kind="simulated",
        method=method.name,
        paper_method=method.paper_method,
        workers=workers,
        seed=config.seed,
        config={
            "hardware": setting.profile.hardware.name,
            "hardware_origin": setting.profile.hardware.origin,
            "workload": asdict(w),
            "micro_batches": n,
            "groups": cluster.groups,
            "noise": asdict(config.noise),
            "stage_ms": {stage: value * 1e3 for stage, value in stages.items()},
        },
        steps=steps,
        metrics=metrics,
        testbed=f"simulated {setting.profile.hardware.name}",
        notes=(
            "simulated on virtual clocks, nothing was run",
            *setting.profile.hardware.notes,
            *_key_notes(w),
            *_left_out(setting, workers),
        ),
        provenance=origin,
    )


def _left_out(setting: Setting, workers: int) -> tuple[str, ...]:
    names = [m.name for m in setting.methods if not setting.fits(m, workers)]
    if not names:
        return ()
    return (f"left out with {workers} workers, fewer than {setting.groups} groups (--groups): {', '.join(names)}",)


def _key_notes(workload: Workload) -> tuple[str, ...]:
    """The source of the key statistics, and the error of their extrapolation if it could be measured."""
    keys = workload.keys
    off = f"; extrapolated to more workers, {keys.error:.1%} off at the largest count held out" if keys.error else ""
    return (f"keys: {keys.source}{off}",)


def scaling(records: Sequence[Record], record: Record) -> float:
    """QPS per worker relative to the same method's at the smallest number of workers in ``records``."""
    return record.scaling_from(min((r for r in records if r.method == record.method), key=lambda r: r.workers))
