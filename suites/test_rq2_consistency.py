"""RQ2, consistency: the losses behind Fig. 6. Convergence itself is `nestpipe report --only fig6`."""

from __future__ import annotations

import pytest

from suites import claims
from suites.replay import play, replay

PART, ALL = "two-hosts", 0


@pytest.mark.part(PART, methods=("serial(8)", "nestpipe"))
@pytest.mark.benchmark(timer=replay.clock)
def test_fig6_steps(point, record, benchmark):
    benchmark.extra_info["final_loss"] = record.losses[-1]
    play(benchmark, "fig6", PART, record)


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
