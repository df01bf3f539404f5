"""``nestpipe calibrate``: this machine's profile, measured on real ranks.

Real ranks run ``serial`` and ``serial(4)``, in which nothing overlaps, on models of several sizes. The time of every
stage has a fixed part and a part in proportion to what it moves or computes. Both come from least squares on relative
errors, and neither is negative. One more run is paced. The time that its dense operations take beyond the pace is
spent copying rows into place, which pacing does not hide. The time that NestPipe's step takes there beyond its
prediction is the cost of overlap if lanes share cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from nestpipe.config import DataConfig, ModelConfig, RunConfig
from nestpipe.measurement.exposed_time import EXPOSED
from nestpipe.methods import NESTPIPE
from nestpipe.schedule.stages import of_stage
from nestpipe.simulator.calibrate.key_sampling import measure_keys
from nestpipe.simulator.cost import Cluster, stage_seconds
from nestpipe.simulator.hardware import Hardware, hardware_to_toml
from nestpipe.simulator.step_times import steady_account
from nestpipe.simulator.workload import Workload
from nestpipe.training.measured_record import MethodRun
from nestpipe.training.runs import run

#: (samples per rank, embedding dim, sequence length, negatives, dense width) of the runs that the rates are fitted to.
SIZES = ((16, 32, 20, 16, 16), (32, 64, 30, 16, 32), (48, 64, 40, 32, 48), (64, 96, 30, 48, 32))
#: By stage, the rate fitted to its times; None for stages that serial training, which is measured, does not have.
RATES: Mapping[str, str | None] = {
    "P": "input_samples_per_s",
    "H": "pcie_bytes_per_s",
    "K": "routing_keys_per_s",
    "R": "host_bytes_per_s",
    "E": "network_bytes_per_s",
    "G": "network_bytes_per_s",
    "A": "allreduce_bytes_per_s",
    "U": "hbm_bytes_per_s",
    "O": "hbm_bytes_per_s",
    "W": "write_bytes_per_s",
    "F": "flops_per_s",
    "B": "flops_per_s",
    "S": None,
    "D": None,
}


@dataclass(frozen=True)
class CalibrateConfig:
    """Measure this machine: All2All, copies, gathers and the dense step, on real ranks."""

    workers: int = 2
    """Rank processes."""
    testbed: str = "loopback"
    """loopback, or netns:200mbit,1ms: one host per rank in a network namespace, with rate and one-way delay (root)."""
    steps: int = 12
    """Steps to measure for each size of model."""
    seed: int = 1
    """Seed of the data and the weights."""


@dataclass(frozen=True)
class StageSample:
    """``seconds``: median of ``stage`` in one run; ``amount``: bytes, keys, samples or FLOP of one operation."""

    stage: str
    amount: float
    seconds: float


def calibrate(
    config: CalibrateConfig, progress: Callable[[str], None] = lambda text: None
) -> tuple[Hardware, list[StageSample]]:
    """The machine's hardware, and the samples behind it. Raises ConfigError, TestbedUnavailable or RankError."""
    runs: list[_Run] = []
    for number, size in enumerate(SIZES, start=1):
        progress(f"size {number} of {len(SIZES)}: {size[0]} samples, dim {size[1]}, length {size[2]}")
        runs += _runs(run_config(config, size))
    # Twice as long as the dense math: none of it shows, and no core has time to go to sleep.
    pace_ms = round(2e3 * max(run.micro_batches * (run.medians["F"] + run.medians["B"]) for run in runs))
    progress(f"the last size with dense paced to {pace_ms} ms, and overlapped")
    paced = replace(run_config(config, SIZES[-1]), methods="serial,serial(4),nestpipe(4)", pace_dense=pace_ms)
    *apart, overlapped = _runs(paced)
    expand = _expand_bytes_per_s(apart)
    samples = [sample for run in runs for sample in stage_samples(run, config.workers, expand)]
    name = f"{config.workers} ranks on this machine, {config.testbed}"
    hardware = hardware_from_samples(samples, name, config.testbed.startswith("netns"), expand)
    return replace(hardware, overlap_cost=_overlap_cost(overlapped, Cluster(hardware, config.workers))), samples


@dataclass(frozen=True)
class _Run:
    """``medians``: seconds by stage, the median over operations of the mean over ranks, without warm-up."""

    workload: Workload
    micro_batches: int
    step_s: float
    medians: Mapping[str, float]


def _runs(config: RunConfig) -> list[_Run]:
    found = []
    for result in run(config):
        n = int(result.record.config["micro_batches"])
        step_s = result.record.median["step_ms"] * 1e-3
        found.append(_Run(measured_workload(config, (n,)), n, step_s, stage_medians(result)))
    return found


def _expand_bytes_per_s(paced: Sequence[_Run]) -> float:
    """Bytes of rows copied into place and of gradients summed, per second of dense operations beyond their pace."""
    seconds = sum(r.micro_batches * (r.medians["F"] + r.medians["B"]) - r.workload.pace_dense_s for r in paced)
    moved = sum(2 * r.workload.key_count * r.workload.embedding_bytes for r in paced)
    return moved / seconds if seconds > 0 else math.inf


def _overlap_cost(run: _Run, cluster: Cluster) -> float:
    """How much longer NestPipe's step is than predicted, per second that it hides."""
    n = run.micro_batches
    seconds = stage_seconds(cluster, run.workload, n)
    predicted = steady_account(NESTPIPE, n, [seconds], cluster.hardware.one_link)
    hidden = sum(float(predicted[name][0] - predicted[f"exposed_{name}"][0]) for name in EXPOSED)
    return max(0.0, run.step_s * 1e3 - float(predicted["step"][0])) / hidden if hidden > 0 else 0.0


def run_config(config: CalibrateConfig, size: tuple[int, int, int, int, int]) -> RunConfig:
    batch, dim, length, negatives, width = size
    return RunConfig(
        methods="serial,serial(4)",
        workers=config.workers,
        steps=config.steps,
        rounds=2,
        testbed=config.testbed,
        seed=config.seed,
        data=DataConfig(batch_size=batch, negatives=negatives),
        model=ModelConfig(embedding_dim=dim, sequence_length=length, width=width),
    )


def measured_workload(config: RunConfig, micro_batches: Sequence[int]) -> Workload:
    """The workload of a real run, its keys counted by the router on as many workers."""
    keys = measure_keys(config.data, config.model, config.seed, (config.workers,), micro_batches)
    model = config.model
    return Workload(
        keys=keys,
        embedding_dim=model.embedding_dim,
        dense_layers=model.dense_layers,
        width=model.width,
        sequence_length=model.sequence_length,
        batch_size=config.data.batch_size,
        negatives=config.data.negatives,
        pace_dense_s=config.pace_dense * 1e-3,
    )


def stage_samples(run: _Run, workers: int, expand: float) -> list[StageSample]:
    """One sample per stage; dense operations without copying rows into place, which runs at ``expand`` bytes/s."""
    outside = run.workload.key_count * run.workload.embedding_bytes / run.micro_batches / expand
    amounts = stage_amounts(run.workload, workers, run.micro_batches)
    return [
        StageSample(
            stage,
            of_stage(amounts, stage, "a rate to calibrate", "RATES in nestpipe/simulator/calibrate/measure.py"),
            max(seconds - (outside if stage in "FB" else 0.0), seconds / 10),
        )
        for stage, seconds in run.medians.items()
    ]


def stage_medians(run: MethodRun) -> dict[str, float]:
    """Seconds by stage: the median over its operations of the mean over ranks, without warm-up. A collective's time
    includes waiting for the ranks that enter later."""
    timeline = run.timelines[0]
    steps = set(run.record.steps)
    times: dict[str, list[float]] = {}
    for i, ref in enumerate(timeline.refs):
        if ref.batch in steps:
            times.setdefault(ref.stage, []).append(float(np.mean(timeline.end[i] - timeline.start[i])))
    return {stage: float(np.median(values)) for stage, values in times.items()}


def stage_amounts(workload: Workload, workers: int, micro_batches: int) -> dict[str, float]:
    """What one operation of each stage moves or computes: the cost model with one rate of 1 and all others infinite."""
    amounts = {}
    for rate, stages in _stages_by_rate().items():
        nothing = Hardware("unit", "measured", **{"flops_per_s": math.inf, rate: 1.0})  # type: ignore[arg-type]
        plain = replace(workload, pace_dense_s=0.0)
        seconds = stage_seconds(Cluster(nothing, workers), plain, micro_batches)
        amounts.update({stage: seconds[stage] for stage in stages})
    return amounts


def hardware_from_samples(
    samples: Sequence[StageSample], name: str, one_link: bool, expand: float = math.inf
) -> Hardware:
    """Rates and fixed times that explain ``samples`` best."""
    overhead: dict[str, float] = {}
    rates: dict[str, float] = {}
    for rate, stages in _stages_by_rate().items():
        slopes, fixed = _line([s for s in samples if s.stage in stages])
        overhead.update(fixed)
        rates[rate] = 1 / slopes if slopes > 0 else math.inf
    dense = {stage: sum(s.seconds for s in samples if s.stage == stage) for stage in "FB"}
    return Hardware(
        name="local",
        origin="measured",
        **rates,  # type: ignore[arg-type]
        expand_bytes_per_s=expand,
        one_link=one_link,
        stage_overhead={stage: value for stage, value in overhead.items() if value > 0},
        notes=(f"measured: {name}", f"forward takes {dense['F'] / sum(dense.values()):.0%} of the dense time"),
    )


def _stages_by_rate() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for stage, rate in RATES.items():
        if rate:
            found.setdefault(rate, []).append(stage)
    return found


def _line(samples: Sequence[StageSample]) -> tuple[float, dict[str, float]]:
    """Seconds per unit, shared by the stages, and fixed seconds of each, by relative least squares; none below 0."""
    stages = sorted({s.stage for s in samples})
    if not samples:
        return 0.0, {}
    largest = max(s.amount for s in samples) or 1.0
    rows = [[s.amount / largest, *(float(s.stage == stage) for stage in stages)] for s in samples]
    seconds = np.array([s.seconds for s in samples])
    found, _ = nnls(np.array(rows) / seconds[:, None], np.ones(len(samples)))
    return float(found[0] / largest), dict(zip(stages, map(float, found[1:]), strict=True))


def profile_toml(hardware: Hardware, config: CalibrateConfig) -> str:
    """The profile file: ``hardware``, the last of SIZES as its workload, and as many workers as were measured."""
    batch, dim, length, negatives, width = SIZES[-1]
    workload = {"embedding_dim": dim, "sequence_length": length, "batch_size": batch, "negatives": negatives}
    text = hardware_to_toml(hardware, {**workload, "width": width, "dense_layers": 2})
    return text.replace("[profile]\n", f"[profile]\nworkers = [{config.workers}]\n", 1)
