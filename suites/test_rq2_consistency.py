"""RQ2, consistency: the losses of every method, and Fig. 6 (short; `nestpipe converge` trains for longer)."""

from __future__ import annotations

import numpy as np
import pytest

from nestpipe.training.convergence import ConvergenceConfig, curve_config, read_curves
from results.experiments.plan import find_part
from results.experiments.run_part import run_part
from suites import claims
from suites.conftest import options_of
from suites.replay import play, replay

PART, ALL = "two-hosts", 0


@pytest.mark.part(PART, methods=("serial(8)", "nestpipe"))
@pytest.mark.benchmark(timer=replay.clock)
def test_fig6_steps(point, record, runs, benchmark):
    claims.trains_alike(record, runs(point.part, point.run)["serial"], tolerance=1e-3)
    benchmark.extra_info["final_loss"] = record.losses[-1]
    play(benchmark, "fig6", PART, record)


def test_fig6_curves(pytestconfig, tmp_path, benchmark):
    full = pytestconfig.option.benchmark
    folder = pytestconfig.option.folder if full else tmp_path
    benchmark.group = "fig6: convergence, all methods and seeds"
    part = find_part("convergence", options_of(pytestconfig))
    benchmark.pedantic(run_part, args=(part, folder), rounds=1, iterations=1)
    (config,) = part.runs
    assert isinstance(config, ConvergenceConfig)
    curves = {(c.method, c.seed): c for c in read_curves(folder / "convergence") if c.config == curve_config(config)}
    assert len(curves) == len(config.method_names) * config.seeds
    if ("torchrec", 1) not in curves:
        pytest.skip("torchrec is not installed")
    early = slice(0, 4)  # later, rounding has grown (see `nestpipe report --only fig6`)
    np.testing.assert_allclose(curves["nestpipe", 1].losses[early], curves["torchrec", 1].losses[early], rtol=1e-4)
    assert all(0 <= value <= 1 for c in curves.values() for value in c.quality["HR@50"])


def test_nestpipe_is_synchronous_bit_for_bit(runs):
    methods = runs(PART, ALL)
    claims.trains_alike(methods["nestpipe"], methods["serial(8)"])


def test_micro_batches_change_rounding_only(runs):
    methods = runs(PART, ALL)
    claims.trains_alike(methods["nestpipe"], methods["serial"], tolerance=1e-3)


def test_real_torchrec_trains_alike(runs):
    methods = runs(PART, ALL)
    if "torchrec" not in methods:
        pytest.skip("torchrec is not installed")
    claims.trains_alike(methods["nestpipe"], methods["torchrec"], tolerance=1e-3)
