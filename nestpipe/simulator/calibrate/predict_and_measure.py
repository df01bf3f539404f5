"""The simulator compared with reality: predicted and measured steps of configurations that calibration has not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nestpipe.config import DataConfig, ModelConfig, RunConfig
from nestpipe.methods import find_method
from nestpipe.simulator.calibrate.measure import CalibrateConfig, measured_workload
from nestpipe.simulator.cost import Cluster
from nestpipe.simulator.hardware import Hardware
from nestpipe.simulator.step_times import method_seconds, simulate_steps
from nestpipe.training.runs import run

METHODS = ("serial", "dbp-only", "fwp-only", "nestpipe")


@dataclass(frozen=True)
class Case:
    """A model that no calibration run used. ``pace_ms``: dense is stretched to this, a stand-in for an accelerator."""

    batch: int
    dim: int
    length: int
    negatives: int
    width: int
    pace_ms: float
    micro_batches: int

    def run_config(self, config: CalibrateConfig) -> RunConfig:
        return RunConfig(
            methods=",".join(METHODS),
            workers=config.workers,
            steps=config.steps,
            rounds=3,
            micro_batches=self.micro_batches,
            testbed=config.testbed,
            pace_dense=self.pace_ms,
            seed=config.seed + 1,
            data=DataConfig(batch_size=self.batch, negatives=self.negatives),
            model=ModelConfig(embedding_dim=self.dim, sequence_length=self.length, width=self.width),
        )


CASES = (
    Case(32, 80, 20, 32, 32, 80.0, 4),
    Case(48, 48, 25, 24, 32, 100.0, 2),
    Case(64, 64, 20, 24, 24, 120.0, 4),
    Case(40, 128, 20, 16, 32, 100.0, 4),
)


@dataclass(frozen=True)
class Comparison:
    """One method on one case: step predicted (simulated) and measured (median; half the interquartile range), ms."""

    workers: int
    case: Case
    method: str
    predicted_ms: float
    measured_ms: float
    spread_ms: float

    @property
    def error_pct(self) -> float:
        return (self.predicted_ms / self.measured_ms - 1) * 100


def predict(case: Case, hardware: Hardware, config: CalibrateConfig) -> list[float]:
    """Predicted steps of METHODS, ms, from ``hardware`` and the keys that the router counts; nothing is run."""
    n = case.micro_batches
    workload = measured_workload(case.run_config(config), (n,))
    cluster = Cluster(hardware, config.workers)
    steps = []
    for name in METHODS:
        method = find_method(name)
        stages = method_seconds(method, cluster, workload, n)
        steps.append(float(simulate_steps(method, cluster, stages, n).mean("step").mean()))
    return steps


def predict_and_measure(
    hardware: Hardware,
    config: CalibrateConfig,
    cases: Sequence[Case] = CASES,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Comparison]:
    """Predict each case, then run it. Raises as ``calibrate`` does."""
    checks = []
    for number, case in enumerate(cases, start=1):
        progress(f"case {number} of {len(cases)}: {case}")
        predicted = predict(case, hardware, config)
        runs = {r.record.method: r.record for r in run(case.run_config(config))}
        for name, ms in zip(METHODS, predicted, strict=True):
            steps = runs[name].metrics["step_ms"]
            low, high = np.percentile(steps, [25, 75])
            checks.append(Comparison(config.workers, case, name, ms, float(np.median(steps)), float(high - low) / 2))
    return checks


def mean_error_pct(checks: Sequence[Comparison]) -> float:
    return float(np.mean([abs(check.error_pct) for check in checks]))
