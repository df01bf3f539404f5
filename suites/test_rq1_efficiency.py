"""RQ1, efficiency: Table II and the ladder serial -> +DBP -> +FWP -> +clustering."""

from __future__ import annotations

import pytest

from suites import claims
from suites.conftest import by_method_and_workers
from suites.replay import play, replay

PART = "two-hosts"
#: Runs of the part: the first has every method, the second has clustering.
ALL, CLUSTERED = 0, 1


@pytest.mark.part(PART)
@pytest.mark.benchmark(timer=replay.clock)
def test_table2(point, record, benchmark):
    claims.parts_sum_to_step(record)
    play(benchmark, "table2", PART, record)


def test_the_ladder(runs):
    methods = runs(PART, ALL)
    claims.hides_nothing(methods["serial"])
    claims.hides_lookups(methods["dbp-only"])
    claims.hides_communication(methods["fwp-only"])
    claims.hides_lookups(methods["nestpipe"])
    claims.hides_communication(methods["nestpipe"])
    claims.sends_less(runs(PART, CLUSTERED)["nestpipe"], methods["nestpipe"])


def test_index_deduplication(runs):
    methods = runs(PART, ALL)
    if "torchrec-dedup" not in methods:
        pytest.skip("torchrec is not installed")
    claims.sends_less(methods["torchrec-dedup"], methods["torchrec"])


def test_table2_simulated(simulate_part):
    at = by_method_and_workers(simulate_part("simulated", "table2"))
    step = {method: at[method, 1536].median["step_ms"] for method in ("serial", "2d-sp", "uniemb", "nestpipe")}
    assert step["nestpipe"] < step["uniemb"] < step["2d-sp"] < step["serial"]


def test_table2_gpu_simulated(simulate_part):
    at = by_method_and_workers(simulate_part("simulated-gpu", "table2"))
    assert at["nestpipe", 128].median["step_ms"] < at["serial", 128].median["step_ms"]
