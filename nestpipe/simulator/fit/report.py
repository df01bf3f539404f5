"""What a fit is worth: errors in sample and held out, what the data identify, what was chosen by looking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nestpipe.methods import Method
from nestpipe.simulator.fit.least_squares import (
    CHOSEN_BY_LOOKING,
    FREE,
    Errors,
    Fitted,
    PublishedNumber,
    compare,
    fit,
    predictor,
    step_targets,
    table_four,
    table_two,
)
from nestpipe.simulator.reference import Reference
from nestpipe.simulator.workload import Workload

#: Values to try for a parameter that is not searched; all others are fitted again for each.
TRIED: Mapping[str, tuple[float, ...]] = {
    "micro_batches": (4, 6, 7, 8, 9, 10, 12),
    "groups": (2, 4, 8),
    "tier_workers": (200, 300, 384, 500, 700),
    "routing_share": (0.3, 0.35, 0.4, 0.5, 0.6, 0.65, 0.7),
    "forward_share": (0.2, 1 / 3, 0.5),
    "micro_batch_ms": (0.0, 0.9, 2.0, 4.0, 8.0),
}


@dataclass(frozen=True)
class Identified:
    """A fitted value and its standard error (ms; ``replica_lookup``: a ratio). ``shared``: part of its variance,
    0..1, that comes from trade-offs with the others."""

    name: str
    value: float
    error: float
    shared: float

    @property
    def known(self) -> bool:
        """Whether the error is less than a quarter of the value."""
        return self.error < 0.25 * abs(self.value)


@dataclass(frozen=True)
class Tried:
    """Another value of a parameter that is not searched, with the others fitted again.

    ``mean_pct``: mean error on the step times. ``worse``: growth of the sum of squares in units of
    the residual variance; below 4 the data do not reject the value.
    """

    value: float
    mean_pct: float
    worse: float


@dataclass(frozen=True)
class Chosen:
    """A parameter that is not searched, and what the data say about other values."""

    name: str
    value: float
    tried: tuple[Tried, ...]

    @property
    def allowed(self) -> tuple[float, ...]:
        """Values tried that the data do not reject."""
        return tuple(t.value for t in self.tried if t.worse < 4)


@dataclass(frozen=True)
class PartOfStep:
    """A published part of a step (Tables II and IV) and the fitted one, ms."""

    method: str
    part: str
    published_ms: float
    predicted_ms: float


@dataclass(frozen=True)
class Report:
    """What ``nestpipe fit`` says. Errors are on step times; ``rounding_floor_pct``: the mean over Table III of the
    error that the two decimals of a QPS cell allow."""

    reference: Reference
    in_sample: Errors
    held_out_methods: Errors
    held_out_scales: Errors
    parts: tuple[PartOfStep, ...]
    rounding_floor_pct: float
    identified: tuple[Identified, ...]
    chosen: tuple[Chosen, ...]

    @property
    def parameters(self) -> int:
        """Number of parameters that were fitted or chosen by looking."""
        return len(FREE) + len(CHOSEN_BY_LOOKING)

    def to_json(self) -> dict[str, Any]:
        return {
            "in_sample": errors_to_json(self.in_sample),
            "held_out_methods": errors_to_json(self.held_out_methods),
            "held_out_scales": errors_to_json(self.held_out_scales),
            "rounding_floor_pct": self.rounding_floor_pct,
            "parameters": {
                "count": self.parameters,
                "fitted": [{**asdict(i), "known": i.known} for i in self.identified],
                "chosen_by_looking": list(CHOSEN_BY_LOOKING),
                "not_searched": [{**asdict(c), "allowed": c.allowed} for c in self.chosen],
            },
            "parts": [asdict(p) for p in self.parts],
            "reference": asdict(self.reference),
        }


def errors_to_json(errors: Errors) -> dict[str, Any]:
    cells = [{**asdict(cell), "error_pct": cell.error_pct} for cell in errors.cells]
    return {"mean_pct": errors.mean_pct, "max_pct": errors.max_pct, "cells": cells}


def identified(fitted: Fitted) -> tuple[Identified, ...]:
    """Standard errors from the Jacobian at the optimum: covariance = s^2 (J^T J)^-1, by singular values."""
    scale = np.linalg.norm(fitted.jacobian, axis=0)
    _, singular, right = np.linalg.svd(fitted.jacobian / scale, full_matrices=False)
    inverse = (right.T / np.maximum(singular, 1e-12) ** 2) @ right
    errors = np.sqrt(variance(fitted) * inverse.diagonal()) / scale
    return tuple(
        Identified(name, float(getattr(fitted.reference, name)), float(error), float(1 - 1 / inflation))
        for name, error, inflation in zip(FREE, errors, inverse.diagonal(), strict=True)
    )


def variance(fitted: Fitted) -> float:
    """Residual variance per degree of freedom."""
    return fitted.sum_of_squares / max(1, len(fitted.residuals) - fitted.jacobian.shape[1])


def full_fit(
    rows: Sequence[PublishedNumber], workload: Workload, methods: Mapping[str, Method], try_other_values: bool = True
) -> Report:
    """Every fit and comparison of ``nestpipe fit``. ``methods`` by paper name.

    In sample: fits 22 step times and Tables II and IV. Held-out methods: fits TorchRec, UniEmb and Table II,
    and predicts the other step times except those whose latency Table II prints. Held-out scales: fits the
    smallest, 512 and the largest, and predicts those in between. ``try_other_values``: fit again for TRIED.
    """
    predict = predictor(workload, methods)
    steps = step_targets(rows)
    parts = table_two(rows, ("lookup", "comm")) + table_four(rows)
    best = fit(predict, steps + parts)

    learned = [t for t in steps if t.method in ("TorchRec", "UniEmb")]
    told = {(t.method, t.workers) for t in table_two(rows, ("step",))}
    unseen = [t for t in steps if t not in learned and (t.method, t.workers) not in told]
    by_method = fit(predict, learned + table_two(rows, ("step", "lookup", "comm")))

    ends = (min(t.workers for t in steps), 512, max(t.workers for t in steps))
    between = [t for t in steps if t.workers not in ends]
    by_scale = fit(predict, [t for t in steps if t.workers in ends] + parts)

    chosen = []
    for name, values in TRIED.items() if try_other_values else ():
        tried = []
        for value in values:
            again = fit(predict, steps + parts, {name: value}, best.reference)
            worse = (again.sum_of_squares - best.sum_of_squares) / variance(best)
            tried.append(Tried(value, compare(predict, again.reference, steps).mean_pct, worse))
        chosen.append(Chosen(name, getattr(best.reference, name), tuple(tried)))
    predicted = predict([best.reference], parts)[0]
    floors = [0.005 / r.value * 100 for r in rows if r.where == "III" and r.metric == "qps"]
    return Report(
        reference=best.reference,
        in_sample=compare(predict, best.reference, steps),
        held_out_methods=compare(predict, by_method.reference, unseen),
        held_out_scales=compare(predict, by_scale.reference, between),
        parts=tuple(PartOfStep(t.method, t.part, t.value, float(ms)) for t, ms in zip(parts, predicted, strict=True)),
        rounding_floor_pct=float(np.mean(floors)),
        identified=identified(best),
        chosen=tuple(chosen),
    )
