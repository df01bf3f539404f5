"""RQ5, orthogonality: Table IV, NestPipe with two-dimensional sparse parallelism."""

from __future__ import annotations

import pytest

from results.experiments.plan import TABLE1_METHODS
from suites import claims
from suites.conftest import by_method_and_workers
from suites.replay import play, replay

PART = "four-hosts"
#: With the families of Table I, which NestPipe is combined with; the others are in RQ3.
METHODS = ("2d-sp", "nestpipe+2d-sp", *TABLE1_METHODS)


@pytest.mark.part(PART, methods=METHODS)
@pytest.mark.benchmark(timer=replay.clock)
def test_table4(point, record, benchmark):
    claims.parts_sum_to_step(record)
    play(benchmark, "table4", PART, record)


def test_both_together(runs):
    methods = runs(PART, 0)
    both = methods["nestpipe+2d-sp"]
    claims.hides_lookups(both)
    claims.hides_communication(both)
    # Half as many ranks in an All2All: fewer keys belong to others. The price is the replicas' synchronisation.
    claims.sends_less(both, methods["nestpipe"])
    assert min(both.metrics["replica_bytes"]) > 0 == max(methods["nestpipe"].metrics["replica_bytes"])


def test_table4_simulated(simulate_part):
    at = by_method_and_workers(simulate_part("simulated", "table4"))
    exposed = {m: at[m, 1536].median["exposed_communication_ms"] for m in ("nestpipe", "2d-sp", "nestpipe+2d-sp")}
    assert exposed["nestpipe+2d-sp"] < exposed["nestpipe"] < exposed["2d-sp"]
