"""``nestpipe advise``: my model, my cluster: which method, how many micro-batches, what limits it, and until where?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from nestpipe.checker.rules import check
from nestpipe.schedule.stages import STAGES
from nestpipe.simulator.cost import ClusterError
from nestpipe.simulator.methods import SimulatedMethod
from nestpipe.simulator.scenario import Scenario, Setting, resolve
from nestpipe.simulator.step_times import stage_costs, steady_step, steady_steps

#: Numbers of micro-batches considered, where they divide the batch.
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
#: A larger number of micro-batches must save this part of a step to be preferred.
WORTH_IT = 0.002
#: What a lane stands for, in words.
LIMITS: Mapping[str, str] = {
    "compute": "dense compute",
    "all2all": "embedding and gradient All2All",
    "rows": "host memory: retrieval and write-back",
    "keys": "key routing",
    "copy": "host-to-device copies",
    "input": "data loading",
    "allreduce": "dense AllReduce",
}


@dataclass(frozen=True)
class Choice:
    """A method with its best number of micro-batches at one size.

    ``parts_ms``: where the step goes (names of ``StepTimes``). ``limits``: by lane, how many percent
    shorter the step gets when that lane's operations get 10 % shorter, times ten: 100 means that
    the step is nothing else. ``synchronous``: the checker's answer, with its first objection.
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
        return f"{self.method}({self.micro_batches}), limited by {LIMITS[self.limited_by]}"

    @property
    def limited_by(self) -> str:
        """The lane that matters most."""
        return max(self.limits, key=lambda lane: self.limits[lane])


@dataclass(frozen=True)
class Change:
    """From ``workers`` on the best synchronous choice differs from that of fewer workers."""

    workers: int
    before: Choice
    after: Choice

    @property
    def text(self) -> str:
        return f"from {self.workers} workers on {self.after.text}; before that {self.before.text}"


@dataclass(frozen=True)
class Advice:
    """``choices``: every method's best at the asked size, fastest first; ``changes``: at larger and smaller sizes."""

    choices: tuple[Choice, ...]
    changes: tuple[Change, ...]
    smallest: int
    largest: int

    @property
    def best(self) -> Choice:
        """The fastest method that trains synchronously."""
        return next((c for c in self.choices if c.synchronous), self.choices[0])


def advise(config: Scenario, known: Mapping[str, SimulatedMethod], workers: int, reach: int = 16) -> Advice:
    """Choose method and micro-batches for ``workers`` workers.

    ``config.micro_batch`` fixes the micro-batch; ``reach``: sizes from workers / reach to workers x
    reach are searched for changes. Raises ValueError in one line, as ``resolve``.
    """
    if reach < 1:
        raise ClusterError(f"reach is {reach}, must be at least 1")
    setting = resolve(config, known)
    if workers < 1:
        raise ClusterError(f"workers is {workers}, must be at least 1")
    fixed = setting.micro_batches if config.micro_batch is not None else None
    methods = [m for m in setting.methods if not (m.grouped and workers % setting.groups)]
    if not methods:
        setting.cluster(setting.methods[0], workers)  # raises, naming the groups
    choices = [_with_parts(setting, m, _choose(setting, m, [workers], fixed)[0]) for m in methods]
    synchronous = [m for m in methods if objection(m) == ""] or methods
    smallest, largest = max(1, workers // reach), workers * reach
    changes = _changes(setting, synchronous, smallest, largest, fixed)
    return Advice(tuple(sorted(choices, key=lambda c: c.step_ms)), tuple(changes), smallest, largest)


@lru_cache(maxsize=64)
def objection(method: SimulatedMethod) -> str:
    """The checker's first objection to ``method`` as synchronous training, empty where there is none."""
    problems = check(method.schedule(2))
    return str(problems[0]) if problems else ""


def _choose(setting: Setting, method: SimulatedMethod, workers: Sequence[int], fixed: int | None) -> list[Choice]:
    """The best number of micro-batches at each of several sizes: the fewest that are hardly slower than the best."""
    counts = [n for n in MICRO_BATCHES if setting.workload.batch_size % n == 0]
    counts = [method.micro_batches or fixed] if method.micro_batches or fixed else counts  # type: ignore[list-item]
    tables = {
        n: [stage_costs(method, setting.cluster(method, size), setting.workload, n) for size in workers] for n in counts
    }
    one_link = setting.profile.hardware.one_link
    steps = np.array([steady_step(method, n, tables[n], one_link) for n in counts])
    best = [int(np.flatnonzero(row <= row.min() * (1 + WORTH_IT))[0]) for row in steps.T]
    chosen: dict[int, Choice] = {}
    for n in dict.fromkeys(counts[b] for b in best):
        places = [i for i, b in enumerate(best) if counts[b] == n]
        limits = _limits(method, n, [tables[n][i] for i in places], one_link)
        for i, limit in zip(places, limits, strict=True):
            step = float(steps[best[i], i])
            chosen[i] = Choice(method.name, workers[i], n, step, {}, limit, not objection(method), objection(method))
    return [chosen[i] for i in range(len(workers))]


def _limits(
    method: SimulatedMethod, n: int, tables: Sequence[Mapping[str, float]], one_link: bool
) -> list[dict[str, float]]:
    """``Choice.limits`` under each of several cost tables."""
    lanes = sorted({op.lane for op in method.schedule(n).ops})
    tried = [
        {s: x * (0.9 if STAGES[s].lane == lane else 1.0) for s, x in table.items()}
        for table in tables
        for lane in ("", *lanes)
    ]
    steps = steady_step(method, n, tried, one_link).reshape(len(tables), -1)
    return [dict(zip(lanes, (1 - row[1:] / row[0]) * 1000, strict=True)) for row in steps]


def _with_parts(setting: Setting, method: SimulatedMethod, choice: Choice) -> Choice:
    table = stage_costs(method, setting.cluster(method, choice.workers), setting.workload, choice.micro_batches)
    times = steady_steps(method, choice.micro_batches, [table], setting.profile.hardware.one_link)
    return replace(choice, parts_ms={name: float(values[0]) for name, values in times.items() if name != "step"})


def _best(
    setting: Setting, methods: Sequence[SimulatedMethod], workers: Sequence[int], fixed: int | None
) -> list[Choice]:
    by_method = [_choose(setting, m, workers, fixed) for m in methods]
    return [min(at_size, key=lambda c: c.step_ms) for at_size in zip(*by_method, strict=True)]


def _changes(
    setting: Setting, methods: Sequence[SimulatedMethod], smallest: int, largest: int, fixed: int | None
) -> list[Change]:
    """Sizes at which the best choice or its limit changes, to within 2 %; what comes and goes inside 15 % is missed."""
    unit = setting.groups if any(m.grouped for m in methods) else 1
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

    def key(choice: Choice) -> tuple[str, int, str]:
        return choice.method, choice.micro_batches, choice.limited_by

    return [(a, b) for a, b in pairwise(choices) if key(a) != key(b)]
