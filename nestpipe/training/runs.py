"""`nestpipe run`: train one or several methods on the same model, data and seed, in interleaved rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist

from nestpipe.config import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from nestpipe.data.dataset import Dataset
from nestpipe.datasets.loader import load_dataset
from nestpipe.measurement.exposed_time import StepTimes, joined, step_times
from nestpipe.measurement.provenance import provenance
from nestpipe.measurement.record import METRICS, Record, metrics_from_times
from nestpipe.measurement.trace import Timeline, observed_timelines, scheduled_timeline
from nestpipe.methods import Method, MethodOptions, find_method
from nestpipe.ranks.pool import RankPool
from nestpipe.ranks.process import RankError
from nestpipe.schedule.operations import MAX_MICRO_BATCHES
from nestpipe.testbed.testbed import parse_testbed
from nestpipe.training.checkpoint import CheckpointError, only_writer
from nestpipe.training.loop import (
    WARM_UP_STEPS,
    AfterStep,
    Interrupted,
    RankResult,
    check_resumable,
    dense_optimizer,
    identity,
    rounds_of,
    train_on_rank,
)

__all__ = [
    "WARM_UP_STEPS",
    "AfterStep",
    "ConfigError",
    "Interrupted",
    "MethodRun",
    "RankResult",
    "RunConfig",
    "account",
    "dense_optimizer",
    "run",
    "run_in_group",
    "train_on_rank",
    "validate",
]


@dataclass(frozen=True)
class RunConfig:
    """Train one or several methods on the same model, data and seed, and report what was hidden behind what."""

    methods: str = "serial,nestpipe,torchrec"
    """Comma-separated methods; serial(8) fixes the number of micro-batches of one."""
    workers: int = 2
    """Rank processes."""
    steps: int = 20
    """Steps per method that are reported; each round runs 4 more to warm up."""
    rounds: int = 2
    """Interleaved rounds that the steps are split over, so that drift of the machine hits all methods alike."""
    epochs: int | None = None
    """Train this many passes over the data instead of `steps`."""
    micro_batches: int = 8
    """Micro-batches per batch, for methods with a frozen window."""
    clustering: bool = False
    """Put samples that share keys into one micro-batch (key-centric clustering), so that fewer keys travel."""
    replica_groups: int = 2
    """Groups of ranks that hold a whole copy of the tables each, for the methods with 2d-sp in their name."""
    sync_interval: int = 1
    """Batches from one averaging of 2d-sp's replicas to the next."""
    testbed: str = "loopback"
    """loopback, or netns:200mbit,1ms: one host per rank by network namespaces, with rate and one-way delay."""
    pace_dense: float = 0.0
    """Stretch the dense forward and backward of a batch to this many ms: a stand-in for an accelerator (0: off)."""
    evaluate: bool = False
    """HR and NDCG of every method at the end."""
    seed: int = 1
    """Seeds data order, initial weights and negatives."""
    timeout: float = 3600.0
    """Seconds after which the run is ended, with the stacks of all ranks."""
    checkpoint: str | None = None
    """Folder for checkpoints, one folder in it per method."""
    checkpoint_every: int = 0
    """Steps of a method from one checkpoint to the next, 0: none unless told to (Slurm does before preemption)."""
    resume: bool = False
    """Go on from the newest checkpoints in --checkpoint; methods without one begin anew."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def training(self) -> TrainingConfig:
        return TrainingConfig(self.data, self.model, self.optimizer, self.seed, self.pace_dense)

    @property
    def method_names(self) -> list[str]:
        return [name.strip() for name in self.methods.split(",") if name.strip()]

    @property
    def chosen(self) -> list[Method]:
        """Raises UnknownMethod."""
        options = MethodOptions(self.replica_groups, self.sync_interval, self.optimizer.sparse_optimizer)
        return [find_method(name).under(options) for name in self.method_names]


#: Of an option of `nestpipe run`; of those with a limit of their own; of a wait in one piece (int milliseconds).
MOST = 2**31 - 1
LIMITS = {"--workers": 8192, "--micro-batches": MAX_MICRO_BATCHES}
LONGEST_S = 2_000_000


class ConfigError(ValueError):
    """A configuration that cannot be run; one line."""


@dataclass(frozen=True)
class MethodRun:
    """One method's run on all ranks: its record and the timelines behind it (together holding all ranks)."""

    record: Record
    timelines: list[Timeline]


Progress = Callable[[str, int, int, float], None]


def validate(config: RunConfig) -> list[Method]:
    """The methods to run. Raises ConfigError or UnknownMethod for what cannot be run."""
    if not config.method_names:
        raise ConfigError("--methods names no method; try --methods serial,nestpipe,torchrec")
    if len(set(config.method_names)) < len(config.method_names):
        raise ConfigError(f"--methods names a method twice: {config.methods}")
    positive = {
        "--workers": config.workers,
        "--steps": config.steps,
        "--rounds": config.rounds,
        "--micro-batches": config.micro_batches,
        "--replica-groups": config.replica_groups,
        "--sync-interval": config.sync_interval,
        "--epochs": 1 if config.epochs is None else config.epochs,
    }
    for option, value in positive.items():
        if value < 1:
            raise ConfigError(f"{option} must be at least 1, not {value}")
        if value > LIMITS.get(option, MOST):
            raise ConfigError(f"{option} must be at most {LIMITS.get(option, MOST)}, not {value}")
    if config.rounds > config.steps:
        raise ConfigError(f"--rounds {config.rounds} is more than --steps {config.steps}")
    if not 0 <= config.pace_dense < math.inf:
        raise ConfigError(f"--pace-dense must be 0 or more milliseconds, not {config.pace_dense}")
    if not config.timeout > 0:
        raise ConfigError(f"--timeout must be above 0 seconds, not {config.timeout}")
    if config.timeout > LONGEST_S:
        raise ConfigError(f"--timeout must be at most {LONGEST_S} seconds (23 days), not {config.timeout:g}")
    if config.seed < 0:
        raise ConfigError(f"--seed must not be negative, got {config.seed}")
    if config.seed > MOST:
        raise ConfigError(f"--seed must be at most {MOST}, got {config.seed}")
    parse_testbed(config.testbed)
    if (config.checkpoint_every or config.resume) and not config.checkpoint:
        raise ConfigError("--checkpoint-every and --resume need a folder: --checkpoint DIR")
    if config.checkpoint_every < 0:
        raise ConfigError(f"--checkpoint-every must not be negative, got {config.checkpoint_every}")
    if any("2d-sp" in name for name in config.method_names) and config.workers % config.replica_groups:
        raise ConfigError(
            f"--workers {config.workers} cannot be split into --replica-groups {config.replica_groups} of equal size"
        )
    for method in config.chosen:
        why = method.refuse(config.model.embedding_dim, config.optimizer.sparse_optimizer) if method.refuse else ""
        if why:
            raise ConfigError(f"{method.name}: {why}")
    return config.chosen


def run(config: RunConfig, progress: Progress | None = None) -> list[MethodRun]:
    """Run on real rank processes.

    Raises ConfigError, UnknownMethod, DataError, TestbedUnavailable, CheckpointError, MemoryError or RankError.
    """
    methods = validate(config)
    testbed = parse_testbed(config.testbed)
    # Here first: what is wrong with the data is then said once, before any rank has started.
    dataset = load_dataset(config.data, config.model, config.seed)
    notes = _data_notes(dataset)

    def on_message(rank: int, message: Any) -> None:
        if progress:
            progress(*message)

    check_resumable(config, dataset)
    try:
        with (
            only_writer(config.checkpoint),
            RankPool(config.workers, testbed=testbed, timeout_s=config.timeout) as pool,
        ):
            ranks = pool.run(train_on_rank, config, on_message=on_message)
    except RankError as error:
        kind, _, what = error.failures[0].what.partition(": ") if error.failures else ("", "", "")
        if kind == CheckpointError.__name__:  # its one line says all
            raise CheckpointError(what) from None
        if kind.endswith("MemoryError") or "can't allocate memory" in what:
            raise MemoryError(f"rank {error.failures[0].rank}: {what}") from None
        raise
    return _method_runs(config, methods, ranks, notes)


def run_in_group(config: RunConfig, after_step: AfterStep | None = None) -> list[MethodRun] | None:
    """As ``run``, on ranks that somebody else started (Slurm, torchrun) and that are in a process group. Collective.

    The runs on rank 0, None on the others. Raises ConfigError also where the group is not of ``config.workers`` ranks,
    Interrupted where ``after_step`` said stop.
    """
    methods = validate(config)
    if dist.get_world_size() != config.workers:
        raise ConfigError(f"{config.workers} workers were asked for, {dist.get_world_size()} ranks were started")
    result = train_on_rank(config, after_step)
    ranks: list[Any] | None = [None] * config.workers if dist.get_rank() == 0 else None
    dist.gather_object(result, ranks)
    if ranks is None:
        return None
    return _method_runs(config, methods, ranks, _data_notes(load_dataset(config.data, config.model, config.seed)))


def _method_runs(
    config: RunConfig, methods: Sequence[Method], ranks: Sequence[dict[str, RankResult]], notes: Sequence[str]
) -> list[MethodRun]:
    baseline = _serial_exposed_ms(config, ranks)
    return [_method_run(config, method, [rank[method.name] for rank in ranks], baseline, notes) for method in methods]


def _data_notes(dataset: Dataset) -> list[str]:
    if not dataset.bad_rows:
        return []
    return [f"{dataset.bad_rows} malformed rows were skipped: " + "; ".join(dataset.bad_row_examples)]


def account(
    method: Method, micro_batches: int, ranks: Sequence[RankResult], replica_groups: int = 1
) -> tuple[StepTimes, list[Timeline]]:
    """Timelines of all ranks and the account of their time; ``replica_groups`` where the schedule has a stage D."""
    spans, offsets = [rank.spans for rank in ranks], [rank.clock_offset for rank in ranks]
    template = method.schedule(micro_batches)
    groups = replica_groups if any(op.ref.stage == "D" for op in template.ops) else 1
    if method.observed:
        timelines = observed_timelines(spans, offsets, groups)
        return joined([step_times(timeline) for timeline in timelines]), timelines
    ops = template.unroll(_end(ranks) + template.depth)
    timeline = scheduled_timeline(ops, spans, offsets, groups)
    return step_times(timeline), [timeline]


def _end(ranks: Sequence[RankResult]) -> int:
    """One past the last step."""
    return ranks[0].results[-1].step + 1


def _reported(config: RunConfig, times: StepTimes, ranks: Sequence[RankResult]) -> list[int]:
    """Of the steps accounted, those that belong to the run and to no warm-up: a round's, or after a resumption."""
    total, resumed = _end(ranks), ranks[0].resumed
    warm_up, first = set[int](), 0
    if resumed is not None:
        warm_up.update(range(resumed, resumed + WARM_UP_STEPS))
    for steps in rounds_of(config, total):
        warm_up.update(range(first, first + WARM_UP_STEPS))
        first += steps
    return [step for step in times.steps if step not in warm_up and (resumed or 0) <= step < total]


def _serial_exposed_ms(config: RunConfig, ranks: Sequence[dict[str, RankResult]]) -> float | None:
    """Median exposed communication (ms) of ``serial`` in this session, None where it did not run."""
    if "serial" not in ranks[0]:
        return None
    times, _ = account(find_method("serial"), 1, [rank["serial"] for rank in ranks])
    keep = [times.steps.index(step) for step in _reported(config, times, [rank["serial"] for rank in ranks])]
    return float(np.median(times.mean("exposed_communication")[keep])) if keep else None


def _method_run(
    config: RunConfig,
    method: Method,
    ranks: Sequence[RankResult],
    serial_exposed_ms: float | None,
    notes: Sequence[str],
) -> MethodRun:
    micro_batches = method.micro_batches or config.micro_batches
    times, timelines = account(method, micro_batches, ranks, config.replica_groups)
    keep = _reported(config, times, ranks)
    by_step = {step[0].step: step for step in zip(*(rank.results for rank in ranks), strict=True)}
    if min(by_step) > 0:
        first = min(by_step)
        notes = [*notes, f"{method.name} went on with another number of ranks: its losses begin with step {first}"]
    metrics = metrics_from_times(times, keep, {s: float(sum(r.samples for r in by_step[s])) for s in keep})
    for name in ("embedding_bytes", "minimum_embedding_bytes", "replica_bytes"):
        metrics[name] = [float(sum(getattr(r, name) for r in by_step[s])) for s in keep]
    metrics["duplication_factor"] = [float(np.mean([r.duplication_factor for r in by_step[s]])) for s in keep]
    if serial_exposed_ms:
        metrics["exposed_vs_serial"] = [x / serial_exposed_ms for x in metrics["exposed_communication_ms"]]
    else:
        metrics["exposed_vs_serial"] = []
    record = Record(
        kind="measured",
        method=method.name,
        paper_method=method.paper_method,
        workers=config.workers,
        seed=config.seed,
        config=identity(config, micro_batches),
        steps=keep,
        metrics={name: metrics[name] for name in METRICS},
        losses=[float(sum(r.loss for r in step)) for step in by_step.values()],
        paced=config.pace_dense > 0,
        testbed=config.testbed,
        evaluation=ranks[0].evaluation,
        notes=notes,
        provenance=provenance(),
    )
    return MethodRun(record, timelines)
