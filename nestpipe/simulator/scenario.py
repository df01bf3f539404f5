"""``nestpipe simulate``: step times on clusters that nobody has at hand, as records of kind ``simulated``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from nestpipe.measurement.exposed_time import StepTimes
from nestpipe.measurement.provenance import provenance
from nestpipe.measurement.record import Record, metrics_from_times
from nestpipe.simulator.cost import Cluster, ClusterError
from nestpipe.simulator.key_statistics import load_statistics
from nestpipe.simulator.methods import SimulatedMethod, select
from nestpipe.simulator.profile import Profile, load_profile, resized
from nestpipe.simulator.step_times import Noise, simulate_steps, stage_costs
from nestpipe.simulator.workload import Workload


@dataclass(frozen=True)
class Scenario:
    """A model on a cluster, as options; None: the profile's."""

    hardware: str = "npu-1536-industrial"
    """A shipped profile (npu-1536-industrial, gpu-128-kuairand, h100-ib), `local` (see calibrate), or a .toml file."""
    methods: str = "all"
    """Comma-separated methods (registered ones of your own and schedule files too), or all of the paper's."""
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
    """off: keys repeat between micro-batches as the router measured it on unclustered KuaiRand-like data."""
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
    """Seeds the noise."""


@dataclass(frozen=True)
class Setting:
    """A configuration resolved: what to simulate on what."""

    profile: Profile
    workload: Workload
    methods: tuple[SimulatedMethod, ...]
    workers: tuple[int, ...]
    micro_batches: int
    groups: int
    leaves_out: bool = False
    """Grouped methods are left out where there are fewer workers than groups: none was asked for by name."""

    def fits(self, method: SimulatedMethod, workers: int) -> bool:
        return not (self.leaves_out and method.grouped and workers < self.groups)

    def cluster(self, method: SimulatedMethod, workers: int) -> Cluster:
        return Cluster(self.profile.hardware, workers, self.groups if method.grouped else 1)


def resolve(config: Scenario, known: Mapping[str, SimulatedMethod], workers: str = "") -> Setting:
    """Look everything up; ``workers`` as in ``SimulateConfig``.

    Raises ValueError (ProfileError, UnknownMethod, ClusterError, WorkloadError), one line.
    """
    profile = load_profile(config.hardware)
    methods = tuple(select(config.methods, known))
    workload = resized(
        profile.workload, config.embedding_dim, config.dense_layers, config.sequence_length, config.batch_size
    )
    if config.clustering == "off":
        duplication = load_statistics("kuairand27k").duplication
        workload = replace(workload, keys=replace(workload.keys, duplication=duplication))
    groups = profile.groups if config.groups is None else config.groups
    setting = Setting(
        profile,
        workload,
        methods,
        worker_counts(workers, profile),
        micro_batches_of(workload, config.micro_batch, profile),
        groups,
        leaves_out=config.methods.strip() == "all" and config.groups is None,
    )
    for method in methods:
        for count in setting.workers:
            if setting.fits(method, count):
                setting.cluster(method, count)
    return setting


def worker_counts(text: str, profile: Profile) -> tuple[int, ...]:
    """``128,256``. Raises ClusterError."""
    if not text.strip():
        return profile.workers
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ClusterError(f"workers '{text}': expected whole numbers with commas, as in 128,256") from None
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


def simulate(config: SimulateConfig, known: Mapping[str, SimulatedMethod]) -> list[Record]:
    """One record of kind ``simulated`` per number of workers and method, in that order. Raises as ``resolve``."""
    if config.steps < 1:
        raise ClusterError(f"steps is {config.steps}, must be at least 1")
    setting = resolve(config, known, config.workers)
    origin = provenance()
    records = []
    for workers in setting.workers:
        serial: StepTimes | None = None
        for method in setting.methods:
            if not setting.fits(method, workers):
                continue
            times = simulate_steps(
                method,
                setting.cluster(method, workers),
                setting.workload,
                setting.micro_batches,
                config.steps,
                config.noise,
                config.seed,
            )
            serial = times if method.name == "serial" else serial
            records.append(_record(setting, config, method, workers, times, serial, origin))
    return records


def _record(
    setting: Setting,
    config: SimulateConfig,
    method: SimulatedMethod,
    workers: int,
    times: StepTimes,
    serial: StepTimes | None,
    origin: Mapping[str, Any],
) -> Record:
    w, n = setting.workload, method.micro_batches or setting.micro_batches
    cluster = setting.cluster(method, workers)
    steps = times.steps
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
    seconds = stage_costs(method, cluster, w, setting.micro_batches)
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
            "stage_ms": {stage: value * 1e3 for stage, value in seconds.items()},
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
    """Where key repetition comes from, and how far its extrapolation was off where that could be seen."""
    keys = workload.keys
    off = f"; extrapolated to more workers, {keys.error:.1%} off at the largest count held out" if keys.error else ""
    return (f"keys: {keys.source}{off}",)


def mean(record: Record, name: str) -> float:
    """Mean of a metric over the steps of ``record``."""
    return float(np.mean(record.metrics[name]))


def scaling(records: Sequence[Record], record: Record) -> float:
    """QPS per worker relative to the same method's at the smallest number of workers in ``records``."""
    same = [r for r in records if r.method == record.method]
    base = min(same, key=lambda r: r.workers)
    return mean(record, "qps") / record.workers / (mean(base, "qps") / base.workers)
