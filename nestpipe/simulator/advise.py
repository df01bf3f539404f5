"""``nestpipe advise``: the best method for a model and a cluster, its micro-batches and limit, and up to which size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from nestpipe.checker.rules import check
from nestpipe.methods import Method
from nestpipe.schedule.operations import Schedule
from nestpipe.simulator.cost import ClusterError
from nestpipe.simulator.scenario import Scenario, Setting, resolve
from nestpipe.simulator.step_times import (
    method_seconds,
    seconds_per_op,
    steady_account,
    steady_plan,
    steady_step_ms,
)
from nestpipe.simulator.virtual_lanes import LanePlan

#: Numbers of micro-batches considered, if they divide the batch.
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
#: A larger number of micro-batches must save this share of a step to be preferred.
WORTH_IT = 0.002
#: What runs on the usual lanes, in words.
LANES: Mapping[str, str] = {
    "compute": "dense compute",
    "all2all": "embedding and gradient All2All",
    "rows": "host memory: retrieval and write-back",
    "keys": "key routing",
    "copy": "host-to-device copies",
    "input": "data loading",
    "allreduce": "dense AllReduce",
    "replicas": "replica synchronisation",
}


@dataclass(frozen=True)
class Choice:
    """A method with its best number of micro-batches at one size.

    ``parts_ms``: the parts of the step (names of ``StepTimes``). ``limits``: by lane of the schedule, the elasticity
    of the step in percent, found by making the lane's operations 10 % shorter: 100 means that the step is bound by
    that lane. ``synchronous``: the checker's answer; ``objection``: its first objection.
    """

    method: str
    workers: int
    micro_batches: int
    step_ms: float
    parts_ms: Mapping[str, float]
    limits: Mapping[str, float]
    synchronous: bool
    objection: str

    @property
    def text(self) -> str:
        return f"{self.method}({self.micro_batches}), limited by {self.limited_by_text}"

    @property
    def limited_by(self) -> str:
        """The lane that matters most."""
        return max(self.limits, key=lambda lane: self.limits[lane])

    @property
    def limited_by_text(self) -> str:
        return LANES.get(self.limited_by, f"lane {self.limited_by}")


@dataclass(frozen=True)
class Change:
    """From ``workers`` on, the best synchronous choice differs from the one for fewer workers."""

    workers: int
    before: Choice
    after: Choice

    @property
    def text(self) -> str:
        return f"from {self.workers} workers on: {self.after.text}; before that: {self.before.text}"


@dataclass(frozen=True)
class Advice:
    """``choices``: every method's best at the given size, fastest first; ``changes``: at larger and smaller sizes."""

    choices: tuple[Choice, ...]
    changes: tuple[Change, ...]
    smallest: int
    largest: int

    @property
    def best(self) -> Choice:
        """The fastest method that trains synchronously."""
        return next((c for c in self.choices if c.synchronous), self.choices[0])


def advise(config: Scenario, workers: int, reach: int = 16) -> Advice:
    """Choose method and micro-batches for ``workers`` workers.

    ``config.micro_batch`` fixes the micro-batch. Sizes from workers / ``reach`` to workers x ``reach`` are searched
    for changes. Raises ValueError with a message of one line, as ``resolve`` does.
    """
    if reach < 1:
        raise ClusterError(f"reach is {reach}; it must be at least 1")
    setting = resolve(config)
    if workers < 1:
        raise ClusterError(f"workers is {workers}; it must be at least 1")
    fixed = setting.micro_batches if config.micro_batch is not None else None
    methods = [m for m in setting.methods if not (m.replicated and workers % setting.groups)]
    if not methods:
        setting.cluster(setting.methods[0], workers)  # raises, naming the groups
    choices = [_with_parts(setting, m, _choose(setting, m, [workers], fixed)[0]) for m in methods]
    synchronous = [m for m in methods if objection(m) == ""] or methods
    smallest, largest = max(1, workers // reach), workers * reach
    changes = _changes(setting, synchronous, smallest, largest, fixed)
    return Advice(tuple(sorted(choices, key=lambda c: c.step_ms)), tuple(changes), smallest, largest)


@lru_cache(maxsize=64)
def objection(method: Method) -> str:
    """The checker's first objection to ``method`` as synchronous training, empty if there is none."""
    problems = check(method.schedule(2))
    return str(problems[0]) if problems else ""


def _choose(setting: Setting, method: Method, workers: Sequence[int], fixed: int | None) -> list[Choice]:
    """The best number of micro-batches at each of several sizes: the fewest that are hardly slower than the best."""
    divisors = [n for n in MICRO_BATCHES if setting.workload.batch_size % n == 0]
    counts = list(dict.fromkeys(method.micro_batches_of(n) for n in ([fixed] if fixed else divisors)))
    seconds = {n: _seconds(setting, method, workers, n) for n in counts}
    plans = {n: steady_plan(method, n, setting.profile.hardware.one_link) for n in counts}
    steps = np.array([steady_step_ms(plans[n], seconds[n]) for n in counts])
    best = [int(np.flatnonzero(row <= row.min() * (1 + WORTH_IT))[0]) for row in steps.T]
    chosen: dict[int, Choice] = {}
    for n in dict.fromkeys(counts[b] for b in best):
        places = [i for i, b in enumerate(best) if counts[b] == n]
        limits = _limits(method.priced_schedule(n), plans[n], seconds[n][:, places])
        for i, limit in zip(places, limits, strict=True):
            step = float(steps[best[i], i])
            chosen[i] = Choice(method.name, workers[i], n, step, {}, limit, not objection(method), objection(method))
    return [chosen[i] for i in range(len(workers))]


def _seconds(setting: Setting, method: Method, workers: Sequence[int], n: int) -> np.ndarray:
    """Float64 [ops of the steady plan, workers]."""
    tables = [method_seconds(method, setting.cluster(method, size), setting.workload, n) for size in workers]
    return seconds_per_op(steady_plan(method, n, setting.profile.hardware.one_link), tables)


def _limits(schedule: Schedule, plan: LanePlan, seconds: np.ndarray) -> list[dict[str, float]]:
    """``Choice.limits`` for each column of ``seconds`` [ops, columns].

    Lanes are the schedule's own: operations that share a link on a machine, and so a lane of the plan, are counted
    separately.
    """
    lane_of = {(op.ref.stage, op.ref.micro): op.lane for op in schedule.ops}
    own = np.array([lane_of[ref.stage, ref.micro] for ref in plan.refs])
    lanes = sorted(set(schedule.lanes))
    shorter = [seconds * np.where(own == lane, 0.9, 1.0)[:, None] for lane in lanes]
    steps = steady_step_ms(plan, np.concatenate([seconds, *shorter], axis=1)).reshape(1 + len(lanes), -1)
    return [dict(zip(lanes, (1 - column[1:] / column[0]) * 1000, strict=True)) for column in steps.T]


def _with_parts(setting: Setting, method: Method, choice: Choice) -> Choice:
    cluster = setting.cluster(method, choice.workers)
    table = method_seconds(method, cluster, setting.workload, choice.micro_batches)
    times = steady_account(method, choice.micro_batches, [table], setting.profile.hardware.one_link)
    return replace(choice, parts_ms={name: float(values[0]) for name, values in times.items() if name != "step"})


def _best(setting: Setting, methods: Sequence[Method], workers: Sequence[int], fixed: int | None) -> list[Choice]:
    by_method = [_choose(setting, m, workers, fixed) for m in methods]
    return [min(at_size, key=lambda c: c.step_ms) for at_size in zip(*by_method, strict=True)]


def _changes(
    setting: Setting, methods: Sequence[Method], smallest: int, largest: int, fixed: int | None
) -> list[Change]:
    """Sizes at which the best choice or its limit changes, to within 2 %. A change undone within 15 % is missed."""
    unit = setting.groups if any(m.replicated for m in methods) else 1
    best = _best(setting, methods, _grid(smallest, largest, 1.15, unit), fixed)
    inside = [size for a, b in _unlike(best) for size in _grid(a.workers, b.workers, 1.02, unit)[1:-1]]
    if inside:
        best = sorted([*best, *_best(setting, methods, inside, fixed)], key=lambda c: c.workers)
    return [Change(b.workers, a, b) for a, b in _unlike(best)]


def _grid(low: int, high: int, factor: float, unit: int) -> list[int]:
    """From ``low`` to ``high`` in steps of about ``factor``, multiples of ``unit``."""
    sizes = [-(-low // unit) * unit]
    while sizes[-1] < high:
        sizes.append(max(sizes[-1] + unit, round(sizes[-1] * factor / unit) * unit))
    return [*sizes[:-1], max(sizes[0], high // unit * unit)] if len(sizes) > 1 else sizes


def _unlike(choices: Sequence[Choice]) -> list[tuple[Choice, Choice]]:
    """Neighbours that differ in method, micro-batches or limit."""
    return [
        (a, b)
        for a, b in pairwise(choices)
        if (a.method, a.micro_batches, a.limited_by) != (b.method, b.micro_batches, b.limited_by)
    ]
