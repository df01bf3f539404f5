"""RQ3, scalability: Table III, Figures 2, 7 and 8."""

from __future__ import annotations

import pytest

from suites import claims
from suites.conftest import by_method_and_workers
from suites.replay import play, replay

PART = "four-hosts"
METHODS = ("serial", "torchrec", "uniemb", "nestpipe")


@pytest.mark.part(PART, methods=METHODS)
@pytest.mark.benchmark(timer=replay.clock)
def test_table3(point, record, benchmark):
    claims.parts_sum_to_step(record)
    play(benchmark, "table3", PART, record)


def test_hiding_works_on_more_ranks(runs):
    methods = runs(PART, 0)
    claims.hides_nothing(methods["serial"])
    claims.hides_lookups(methods["nestpipe"])
    claims.hides_communication(methods["nestpipe"])


def test_figures_2_7_and_8_simulated(simulate_part):
    at = by_method_and_workers(simulate_part("simulated", "fig2, fig7, fig8"))
    scale = {method: claims.scales(at, method, 128, 1536) for method in ("serial", "2d-sp", "uniemb", "nestpipe")}
    assert scale["serial"] < scale["2d-sp"] < scale["uniemb"] < scale["nestpipe"]
    share = {n: at["serial", n].median["exposed_lookup_ms"] / at["serial", n].median["step_ms"] for n in (128, 1536)}
    assert share[128] < share[1536], "lookup overhead grows with the cluster (Fig. 2)"
    assert at["nestpipe", 1536].median["utilisation"] > 0.9 > 0.3 > at["serial", 1536].median["utilisation"]
