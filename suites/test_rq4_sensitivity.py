"""RQ4, sensitivity: Fig. 9 (micro-batch) and Fig. 10 (embedding dim, dense layers, sequence length)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nestpipe.training.runs import RunConfig
from results.experiments.plan import find_part
from results.figures.fig9_10_sizes import one_dimension
from results.frames.frames import simulated_means
from results.frames.labels import only
from results.sources import distinct
from suites import claims
from suites.conftest import options_of
from suites.replay import play, replay


@pytest.mark.part("micro-batches")
@pytest.mark.benchmark(timer=replay.clock)
def test_fig9(point, record, benchmark):
    claims.parts_sum_to_step(record)
    play(benchmark, "fig9", "micro-batches", record)


@pytest.mark.part("sizes")
@pytest.mark.benchmark(timer=replay.clock)
def test_fig10(point, record, benchmark):
    claims.parts_sum_to_step(record)
    play(benchmark, "fig10", "sizes", record)


def test_more_micro_batches_repeat_keys_and_clustering_helps(runs):
    plain, clustered = (runs("micro-batches", i) for i in (0, 1))
    claims.sends_less(plain["nestpipe(2)"], plain["nestpipe(16)"])
    claims.sends_less(clustered["nestpipe(4)"], plain["nestpipe(4)"])


def test_larger_rows_are_more_traffic(runs, pytestconfig):
    part = find_part("sizes", options_of(pytestconfig))
    models = [config.model for config in part.runs if isinstance(config, RunConfig)]
    by_dim = {
        model.embedding_dim: np.sum(runs("sizes", i)["nestpipe"].metrics["embedding_bytes"])
        for i, model in enumerate(models)
        if replace(model, embedding_dim=models[0].embedding_dim) == models[0]
    }
    small, *_, large = sorted(by_dim)
    assert by_dim[large] / by_dim[small] == pytest.approx(large / small, rel=1e-6)


def test_fig9_simulated(simulate_part):
    records = [r for r in simulate_part("simulated-micro-batches", "fig9") if r.method == "nestpipe"]
    clustered = {
        r.config["micro_batches"]: r.median for r in records if not r.config["workload"]["keys"]["duplication"]
    }
    ratios = [clustered[n]["exposed_communication_ratio"] for n in sorted(clustered)]
    assert len(ratios) == 6
    assert ratios == pytest.approx([1 / n for n in sorted(clustered)], rel=0.02), "exposed share is 1/N"


def test_fig10_simulated(simulate_part):
    frame = simulated_means(distinct(simulate_part("simulated-sizes", "fig10")))  # the reference is in each sweep
    for name in ("embedding_dim", "dense_layers", "sequence_length"):
        sweep = one_dimension(only(frame, "serial"), name).sort_values(name)
        assert len(sweep) == 3 and sweep["step_ms"].is_monotonic_increasing, f"a larger {name} takes longer"
