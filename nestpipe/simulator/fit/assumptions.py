"""Every assumption behind a fitted profile, and how far the largest cluster's step moves if it is off by 20 %."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nestpipe.methods import Method
from nestpipe.simulator.cost import cluster_of, stage_seconds
from nestpipe.simulator.reference import Reference, reference_hardware
from nestpipe.simulator.step_times import steady_account
from nestpipe.simulator.workload import Workload

#: name -> (what is assumed, how it is known).
TEXTS: Mapping[str, tuple[str, str]] = {
    "dense_ms": ("one dense time for all methods and scales; includes updates and dense AllReduce", "fitted"),
    "hand_over_ms": ("exposed lookup of a pipeline: fixed for any workers; its mechanism is not known", "fitted"),
    "exchange_ms": ("All2All of few workers, both directions; an even split between them", "fitted"),
    "exchange_per_worker_ms": ("congestion: All2All grows linearly with the group, in proportion to bytes", "fitted"),
    "lookup_ms": ("lookup on few workers, including write-back", "fitted"),
    "lookup_per_worker_ms": ("lookup grows linearly with all workers, in 2D-SP's groups as well", "fitted"),
    "lookup_jump_ms": (
        "a jump of the lookup beyond a tier: unexplained, because communication shows no jump",
        "fitted",
    ),
    "replica_lookup": ("2D-SP's lookup relative to TorchRec's: unexplained", "fitted"),
    "replica_sync_ms": ("2D-SP's replica AllReduce, every step, hidden by FWP like the gradient All2All", "fitted"),
    "micro_batches": ("N of FWP in the tables; the exposed share of 13 % suggests it", "chosen by looking"),
    "groups": ("2D-SP's replica groups", "chosen by looking"),
    "tier_workers": ("the tier of the jump; any value from 256 to 511 fits equally well", "chosen by looking"),
    "routing_share": ("part of the lookup that is key routing; the data allow 0.34 to 0.66", "assumed"),
    "forward_share": ("forward : backward = 1 : 2", "assumed"),
    "micro_batch_ms": ("fixed dense cost of each micro-batch; the data allow 0 to 4", "chosen by looking"),
    "duplication": ("no key travels more than once per batch; raised here by 20 %", "assumed"),
}
_COUNTED = {"micro_batches": (6, 10), "groups": (3, 6), "tier_workers": (307, 461)}


@dataclass(frozen=True)
class Assumption:
    """``low``, ``high``: values tried. ``moves``: by method, percent change of the step at each of the two."""

    name: str
    text: str
    basis: str
    value: float
    low: float
    high: float
    moves: Mapping[str, tuple[float, float]]


def assumptions(
    reference: Reference, workload: Workload, methods: Mapping[str, Method], workers: int = 1536
) -> list[Assumption]:
    """How the step of ``methods`` on ``workers`` workers moves, one assumption at a time."""
    base = _steps(reference, workload, methods, workers)
    result = []
    for name, (text, basis) in TEXTS.items():
        value = 1.0 if name == "duplication" else float(getattr(reference, name))
        low, high = _COUNTED.get(name, (value * 0.8, value * 1.2))
        if name == "duplication":
            low = 1.0
        tried = [_steps(*_changed(reference, workload, name, x), methods, workers) for x in (low, high)]
        moves = {m: tuple(float((t[m] / base[m] - 1) * 100) for t in tried) for m in methods}
        result.append(Assumption(name, text, basis, value, low, high, moves))  # type: ignore[arg-type]
    return result


def _changed(reference: Reference, workload: Workload, name: str, value: float) -> tuple[Reference, Workload]:
    if name == "duplication":
        keys = replace(workload.keys, duplication={reference.micro_batches: value})
        return reference, replace(workload, keys=keys)
    changed: Any = int(value) if name in _COUNTED else value
    return replace(reference, **{name: changed}), workload


def _steps(reference: Reference, workload: Workload, methods: Mapping[str, Method], workers: int) -> dict[str, float]:
    hardware = reference_hardware("assumption", reference, workload)
    steps = {}
    for name, method in methods.items():
        n = method.micro_batches_of(reference.micro_batches)
        stages = stage_seconds(cluster_of(method, hardware, workers, reference.groups), workload, n)
        steps[name] = float(steady_account(method, n, [stages])["step"][0])
    return steps
