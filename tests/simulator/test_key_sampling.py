"""Key repetition measured by the router, and the arithmetic of calibration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.data.batch import Batch
from nestpipe.measurement.exposed_time import EXPOSED
from nestpipe.methods import find_method
from nestpipe.simulator.calibrate.key_sampling import measure_keys
from nestpipe.simulator.calibrate.measure import (
    RATES,
    SIZES,
    CalibrateConfig,
    StageSample,
    hardware_from_samples,
    profile_toml,
    stage_amounts,
)
from nestpipe.simulator.cost import Cluster, stage_seconds
from nestpipe.simulator.key_statistics import known_statistics, load_statistics
from nestpipe.simulator.profile import load_profile
from nestpipe.simulator.step_times import method_seconds, simulate_steps
from nestpipe.simulator.workload import KeyStatistics, Workload, WorkloadError

DATA = DataConfig(batch_size=24, negatives=8, data_scale=0.001)
MODEL = ModelConfig(sequence_length=20)


def flat(batch: Batch) -> np.ndarray:
    return np.concatenate([feature.values().numpy() for feature in batch.sparse.values()])


def test_router_counts_what_counting_by_hand_gives():
    from nestpipe.datasets.loader import load_dataset

    measured = measure_keys(DATA, MODEL, 3, worker_counts=(1, 2, 4), micro_batches=(2, 4), batches=2)
    dataset = load_dataset(DATA, MODEL, 3)
    source = dataset.batches(0, 1)
    keys, distinct, travelling = [], [], []
    for _ in range(2):
        batch = next(source)
        keys.append(len(flat(batch)))
        distinct.append(len(np.unique(flat(batch))))
        travelling.append(sum(len(np.unique(flat(part))) for part in batch.split(4)))
    assert measured.keys_per_sample == pytest.approx(np.mean(keys) / 24)
    assert measured.distinct_share == pytest.approx(np.mean(distinct) / np.mean(keys))
    assert measured.duplication[4] == pytest.approx(np.mean(np.array(travelling) / distinct))
    assert 1 <= measured.duplication[2] <= measured.duplication[4]
    assert 0 < measured.rows_exponent <= 1 and 0 <= measured.error < 0.5
    assert "measured by the router" in measured.source


def test_a_single_number_of_workers_is_exact():
    measured = measure_keys(DATA, MODEL, 3, worker_counts=(4,), micro_batches=(2,), batches=2)
    workload = Workload(measured, batch_size=24)
    total = 4 * workload.rows(4)
    assert 0 < total <= 4 * workload.distinct * (1 + 1e-9)


def test_shipped_statistics_are_sane_and_unknown_ones_list_them():
    assert known_statistics() == ["kuairand27k"]
    keys = load_statistics("kuairand27k")
    factors = [keys.duplication_at(n) for n in (1, 2, 4, 8, 16, 32)]
    assert factors[0] == 1.0 and factors == sorted(factors) and factors[-1] < 1.5
    assert 0 < keys.error < 0.2
    with pytest.raises(WorkloadError, match="unknown key statistics 'x': choose one of kuairand27k"):
        load_statistics("x")


def test_calibration_recovers_rates_and_fixed_times():
    """The cost model itself makes samples from known hardware, and calibration finds the same hardware."""
    truth = load_profile("h100-ib").hardware
    fixed = {"E": 0.002, "G": 0.001, "F": 0.003, "B": 0.004, "R": 0.0005, "K": 0.01, "P": 0.0001}
    rates = {rate: getattr(truth, rate) for rate in RATES.values() if rate}
    samples = []
    for batch, dim, length, negatives, width in SIZES:
        workload = Workload(KeyStatistics(float(length + negatives)), dim, 2, width, length, batch, negatives)
        for n in (1, 4):
            for stage, amount in stage_amounts(workload, 2, n).items():
                rate = RATES[stage]
                samples.append(StageSample(stage, amount, amount / rates[rate] + fixed.get(stage, 1e-4)))
    found = hardware_from_samples(samples, "test", True)
    assert found.network_bytes_per_s == pytest.approx(truth.network_bytes_per_s, rel=1e-3)
    assert found.flops_per_s == pytest.approx(truth.flops_per_s, rel=1e-3)
    for stage, value in fixed.items():
        assert found.stage_overhead[stage] == pytest.approx(value, rel=1e-3), stage


def test_a_calibrated_profile_can_be_loaded(tmp_path):
    samples = [StageSample(s, 1.0, 0.1) for s in "PHKREGFBAUOW"] + [StageSample(s, 3.0, 0.2) for s in "PHKREGFBAUOW"]
    hardware = hardware_from_samples(samples, "2 ranks, loopback", True)
    path = tmp_path / "local.toml"
    path.write_text(profile_toml(hardware, CalibrateConfig(workers=2)))
    profile = load_profile(str(path))
    assert profile.workers == (2,) and profile.hardware.one_link
    assert profile.hardware.stage_overhead == pytest.approx(hardware.stage_overhead)


def test_local_before_calibration_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="run 'nestpipe calibrate' first"):
        load_profile("local")


def test_paced_dense_lasts_at_least_the_pace():
    profile = load_profile("h100-ib")
    paced = replace(profile.workload, pace_dense_s=1.0)
    seconds = stage_seconds(Cluster(profile.hardware, 2), paced, 4)
    assert seconds["F"] == pytest.approx(1 / 12) and seconds["B"] == pytest.approx(2 / 12)
    slow = replace(profile.workload, pace_dense_s=1e-6)
    assert stage_seconds(Cluster(profile.hardware, 2), slow, 4) == stage_seconds(
        Cluster(profile.hardware, 2), profile.workload, 4
    )


def test_overlap_costs_what_it_hides():
    """Serial hides nothing and pays nothing; NestPipe's dense compute grows by the cost of what it hides."""
    profile = load_profile("h100-ib")
    shared = replace(profile.hardware, overlap_cost=0.5)
    for name in ("serial", "nestpipe"):
        method = find_method(name)
        clusters = [Cluster(hardware, 16) for hardware in (profile.hardware, shared)]
        before, after = (
            simulate_steps(method, cluster, method_seconds(method, cluster, profile.workload, 4), 4)
            for cluster in clusters
        )
        hidden = sum(before.mean(part).mean() - before.mean(f"exposed_{part}").mean() for part in EXPOSED)
        grown = after.mean("dense").mean() - before.mean("dense").mean()
        assert grown == pytest.approx(0.5 * hidden, rel=0.02, abs=1e-9)
        assert (hidden > 1.0) == (name == "nestpipe")


def test_overheads_of_collectives_do_not_apply_to_one_worker():
    profile = load_profile("h100-ib")
    hardware = replace(profile.hardware, stage_overhead={"E": 1.0, "A": 1.0, "D": 1.0, "R": 1.0})
    alone = stage_seconds(Cluster(hardware, 1), profile.workload, 4)
    assert alone["E"] == alone["A"] == alone["D"] == 0.0 and alone["R"] > 1.0
    assert stage_seconds(Cluster(hardware, 4, 2), profile.workload, 4)["D"] > 1.0
