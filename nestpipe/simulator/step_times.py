"""Times a method on a cluster by its schedule and the cost model; the account of steps is that of a real run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from nestpipe.measurement.exposed_time import EXPOSED, StepTimes, step_times
from nestpipe.measurement.trace import Timeline
from nestpipe.methods import Method
from nestpipe.schedule.building import folded
from nestpipe.schedule.stages import COMPUTE_LANE, STAGES
from nestpipe.simulator.cost import Cluster, price, stage_seconds
from nestpipe.simulator.virtual_lanes import LanePlan, lane_plan, run_lanes
from nestpipe.simulator.workload import Workload

#: Batches at the start and at the end of a run that are not reported: the pipeline fills and drains.
WARM_UP, DRAIN = 6, 4
#: Steps that a steady step is the mean of: if a host stage limits a pipeline, long and short steps may alternate.
STEADY_STEPS = 12


@dataclass(frozen=True)
class Noise:
    """How workers differ, as relative spreads; all 0 makes every worker alike. Draws are lognormal with mean 1."""

    compute_jitter: float = 0.0
    """Every dense, update and synchronisation operation."""
    key_skew: float = 0.0
    """Load of a worker's shard: fixed per worker, on key routing, retrieval, update and write-back."""
    length_imbalance: float = 0.0
    """Length of a worker's samples: new for every batch, on its dense operations."""
    stragglers: float = 0.0
    """Share of the workers that are slow ..."""
    straggler_slowdown: float = 0.2
    """... and by how much, on all local operations."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < np.inf:
                raise ValueError(f"noise: {name.replace('_', ' ')} is {value}; it must be at least 0")
        if self.stragglers > 1:
            raise ValueError(
                f"noise: stragglers is {self.stragglers}; it is a share of the workers and must be at most 1"
            )

    @property
    def silent(self) -> bool:
        return not (self.compute_jitter or self.key_skew or self.length_imbalance or self.stragglers)


@dataclass(frozen=True)
class NoisyDurations:
    """``Durations`` computed one row at a time: mean seconds per operation, times the factors of its workers.

    A row depends only on the seed and the operation's number, so it is the same each time it is read.
    """

    plan: LanePlan
    seconds: np.ndarray
    workers: int
    noise: Noise
    seed: int
    fixed: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.seconds), self.workers

    def __getitem__(self, i: int, /) -> np.ndarray:
        mean, noise = self.seconds[i], self.noise
        stage, batch, _ = self.plan.ops[i].ref
        if mean == 0.0 or noise.silent:
            return np.full(self.workers, mean)
        row = np.full(self.workers, mean)
        kinds = STAGES[stage].noise
        if STAGES[stage].group is None:
            row *= self.fixed["straggler"]
        if "keys" in kinds:
            row *= self.fixed["keys"]
        if "length" in kinds and noise.length_imbalance:
            row *= _lognormal(noise.length_imbalance, self.workers, self.seed, 1, batch)
        if "jitter" in kinds and noise.compute_jitter:
            row *= _lognormal(noise.compute_jitter, self.workers, self.seed, 2, i)
        return row


def _lognormal(spread: float, workers: int, *key: int) -> np.ndarray:
    """Float64 [workers] of mean 1 and relative standard deviation ``spread``."""
    if not spread:
        return np.ones(workers)
    sigma = np.sqrt(np.log1p(spread**2))
    return np.exp(np.random.Generator(np.random.SFC64(key)).standard_normal(workers) * sigma - sigma**2 / 2)


@lru_cache(maxsize=128)
def method_plan(method: Method, micro_batches: int, batches: int, one_link: bool = False) -> LanePlan:
    """The lane plan of ``batches`` batches of what the cost model times. ``one_link``: see ``Hardware``."""
    schedule = method.priced_schedule(micro_batches)
    if one_link:
        schedule = folded(schedule, {"allreduce": "all2all", "replicas": "all2all"})
    return lane_plan(schedule.unroll(batches))


def seconds_per_op(plan: LanePlan, stages: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Float64 [ops, len(stages)]: seconds of each operation under each of several cost tables."""
    letters = sorted({op.ref.stage for op in plan.ops})
    table = np.array([[price(stage, letter) for stage in stages] for letter in letters])
    return table[[letters.index(op.ref.stage) for op in plan.ops]]


def simulate_timeline(
    method: Method,
    cluster: Cluster,
    stages: Mapping[str, float],
    micro_batches: int = 8,
    steps: int = 20,
    noise: Noise = Noise(),
    seed: int = 1,
) -> Timeline:
    """Virtual timeline of ``steps`` steps after the pipeline has filled, with one column per worker.

    ``stages``: seconds by stage, see ``method_seconds``. Without noise all workers are alike, and there is only one
    column, for all of them.
    """
    plan = method_plan(method, micro_batches, WARM_UP + steps + DRAIN, cluster.hardware.one_link)
    seconds = seconds_per_op(plan, [stages])
    if noise.silent:
        return run_lanes(plan, seconds, independent=True)
    n = cluster.workers
    slow = np.random.Generator(np.random.SFC64((seed, 4))).random(n) < noise.stragglers
    fixed = {
        "keys": _lognormal(noise.key_skew, n, seed, 3),
        "straggler": np.where(slow, 1 + noise.straggler_slowdown, 1.0),
    }
    return run_lanes(plan, NoisyDurations(plan, seconds[:, 0], n, noise, seed, fixed), cluster.group_size)


def method_seconds(method: Method, cluster: Cluster, workload: Workload, micro_batches: int) -> dict[str, float]:
    """``stage_seconds`` with the method's number of micro-batches.

    If hiding something costs dense compute time (``Hardware.overlap_cost``), F and B include that time. How much the
    method hides is found by a simulation without that cost.
    """
    n, h = method.micro_batches_of(micro_batches), cluster.hardware
    seconds = stage_seconds(cluster, workload, n)
    if not h.overlap_cost:
        return seconds
    times = steady_account(method, n, [seconds], h.one_link)
    hidden = sum(float(times[name][0] - times[f"exposed_{name}"][0]) for name in EXPOSED) * 1e-3
    extra = h.overlap_cost * hidden / (2 * n)
    return {**seconds, "F": seconds["F"] + extra, "B": seconds["B"] + extra}


def simulate_steps(
    method: Method,
    cluster: Cluster,
    stages: Mapping[str, float],
    micro_batches: int = 8,
    steps: int = 20,
    noise: Noise = Noise(),
    seed: int = 1,
) -> StepTimes:
    """Account of the ``steps`` steps in the middle of ``simulate_timeline``, defined as for a real run."""
    return _middle(step_times(simulate_timeline(method, cluster, stages, micro_batches, steps, noise, seed)), steps)


def _middle(times: StepTimes, steps: int) -> StepTimes:
    first = times.steps.index(WARM_UP)
    keep = slice(first, first + steps)
    return StepTimes(times.steps[keep], {name: values[keep] for name, values in times.ms.items()})


def steady_account(
    method: Method, micro_batches: int, stages: Sequence[Mapping[str, float]], one_link: bool = False
) -> dict[str, np.ndarray]:
    """Milliseconds of a steady step under each of several cost tables (one worker each), by name of ``StepTimes``.

    All tables run in one pass. The values are means over STEADY_STEPS steps.
    """
    plan = steady_plan(method, micro_batches, one_link)
    times = _middle(step_times(run_lanes(plan, seconds_per_op(plan, stages), independent=True)), STEADY_STEPS)
    return {name: values.mean(axis=0) for name, values in times.ms.items()}


def steady_plan(method: Method, micro_batches: int, one_link: bool = False) -> LanePlan:
    """The plan from which a steady step is cut."""
    return method_plan(method, micro_batches, WARM_UP + STEADY_STEPS + DRAIN, one_link)


def steady_step_ms(plan: LanePlan, seconds: np.ndarray) -> np.ndarray:
    """Milliseconds [columns] of a steady step: ``step`` of ``steady_account``, without the account of its parts.

    ``plan``: a ``steady_plan``; ``seconds`` [ops, columns]: see ``seconds_per_op``.
    """
    last = {op.ref.batch: i for i, op in enumerate(plan.ops) if op.lane == COMPUTE_LANE}
    end = run_lanes(plan, seconds, independent=True).end
    return (end[last[WARM_UP + STEADY_STEPS - 1]] - end[last[WARM_UP - 1]]) / STEADY_STEPS * 1e3
