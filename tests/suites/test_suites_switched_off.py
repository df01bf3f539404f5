"""Each suite fails when its feature is switched off (real tiny runs of another method under the feature's name)."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


def failures(tests: str, **environment: str) -> tuple[list[str], str]:
    """Names of the tests that fail, and the output."""
    files, _, chosen = tests.partition(" ")
    plugin = ["-p", "tests.support.switched_off"] if environment else []
    command = [sys.executable, "-m", "pytest", *plugin, files, "-k", chosen, "-q", "-rf", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return re.findall(r"^FAILED suites/\S+::(\w+)", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("off", "tests", "reason"),
    [
        ("dbp-only=serial", "suites/test_rq1_efficiency.py test_the_ladder", "ms lookup are exposed"),
        ("nestpipe=fwp-only", "suites/test_rq1_efficiency.py test_the_ladder", "ms lookup are exposed"),
        # Not dbp-only for nestpipe: its All2All hides behind the dense AllReduce, up to half of it on these tiny runs.
        ("fwp-only=serial", "suites/test_rq1_efficiency.py test_the_ladder", "ms communication are exposed"),
        ("clustering", "suites/test_rq1_efficiency.py test_the_ladder", "bytes"),
        ("torchrec-dedup=torchrec", "suites/test_rq1_efficiency.py test_index_deduplication", "bytes"),
        ("nestpipe=uniemb", "suites/test_rq2_consistency.py test_nestpipe_is_synchronous_bit_for_bit", "losses differ"),
        ("nestpipe=serial", "suites/test_rq3_scalability.py test_hiding_works_on_more_ranks", "are exposed"),
        ("clustering", "suites/test_rq4_sensitivity.py test_more_micro_batches", "bytes"),
        ("nestpipe+2d-sp=nestpipe", "suites/test_rq5_orthogonality.py test_both_together", "bytes"),
        ("nestpipe=serial", "suites/test_rq1_efficiency.py test_table2_simulated", "assert"),
        ("nestpipe=serial", "suites/test_rq3_scalability.py test_figures_2_7_and_8_simulated", "assert"),
        ("nestpipe=serial", "suites/test_rq4_sensitivity.py test_fig9_simulated", "assert"),
        ("nestpipe+2d-sp=2d-sp", "suites/test_rq5_orthogonality.py test_table4_simulated", "assert"),
    ],
)
def test_a_suite_fails_without_its_feature(off, tests, reason):
    if "torchrec" in off:
        pytest.importorskip("torchrec")
    failed, output = failures(tests, NESTPIPE_SWITCHED_OFF=off)
    assert failed and all(name.startswith(tests.split(" ")[1]) for name in failed), output
    assert reason in output
