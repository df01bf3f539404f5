"""Running the plan: what is finished is kept, and the suites' claims fail when a feature is off."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nestpipe import cli
from nestpipe.measurement.record import Store
from nestpipe.measurement.trace import Timeline
from nestpipe.testbed.testbed import TestbedUnavailable
from nestpipe.training.runs import MethodRun
from results.experiments import run_part as measure
from results.experiments.plan import Options, find_part
from results.report.report import read_times
from suites import claims
from tests.support.made_records import measured, session


@pytest.fixture
def ran(monkeypatch):
    """Runs that would have been started, each answered by a made record."""
    started = []

    def run(config, progress=None):
        started.append(config)
        if config.testbed.startswith("netns") and run.no_hosts:
            raise TestbedUnavailable("no namespaces here")
        return [MethodRun(_record(config, name), [_no_timeline()]) for name in config.method_names]

    run.no_hosts = False
    monkeypatch.setattr(measure, "run", run)
    return started, run


def _record(config, method):
    from dataclasses import asdict

    left_out = ("methods", "workers", "seed", "testbed", "timeout")
    whole = {name: value for name, value in asdict(config).items() if name not in left_out}
    made = measured(method, [2.0, 3.0], workers=config.workers, seed=config.seed)
    return replace(made, config=whole, testbed=config.testbed, paced=config.pace_dense > 0)


def _no_timeline():
    import numpy as np

    empty = np.zeros((0, 1))
    return Timeline((), (), empty, empty, empty, np.zeros((0, 1), dtype=np.int64))


def test_finished_runs_are_kept_and_an_interrupted_part_goes_on(tmp_path, ran):
    started, _ = ran
    part = find_part("four-hosts", Options())
    first = replace(part, runs=part.runs[:1])
    assert measure.run_part(first, tmp_path).measured == len(part.runs[0].method_names)
    assert len(started) == 1
    whole = measure.run_part(part, tmp_path)
    assert len(started) == len(part.runs), "only the runs that were not there"
    again = measure.run_part(part, tmp_path)
    assert len(started) == len(part.runs) and again.measured == 0
    assert {r.key for r in again.records} == {r.key for r in whole.records}
    # A method that is lacking costs its whole run: methods are compared within a run.
    next((tmp_path / "records" / "four-hosts").glob("measured-nestpipe-*.json")).unlink()
    measure.run_part(part, tmp_path)
    assert len(started) == len(part.runs) + 1
    measure.run_part(part, tmp_path, again=True)
    assert len(started) == 2 * len(part.runs) + 1


def test_without_shaped_hosts_loopback_is_measured_and_said(tmp_path, ran):
    started, run = ran
    run.no_hosts = True
    part = find_part("micro-batches", Options())
    done = measure.run_part(part, tmp_path)
    assert {r.testbed for r in done.records} == {"loopback"}
    assert done.notes == ("no namespaces here; measured on loopback instead: links are not shaped",)
    assert [c.testbed for c in started] == ["netns:200mbit,1ms", "loopback", "loopback"]
    measure.run_part(part, tmp_path)
    assert len(started) == 4, "the testbed is tried again, finished runs are not"


def test_the_command_runs_parts_and_reports(tmp_path, ran, capsys):
    started, _ = ran
    words = ["reproduce", "--folder", str(tmp_path), "--only", "fig9", "--size", "tiny", "--testbed", "loopback"]
    assert cli.main(words) == 0
    assert len(started) == 2 and (tmp_path / "report.html").is_file()
    times = read_times(tmp_path)
    assert set(times) == {"simulated-micro-batches", "micro-batches"}
    assert cli.main(words) == 0 and len(started) == 2
    assert "kept from before" in capsys.readouterr().err
    assert read_times(tmp_path)["micro-batches"] == times["micro-batches"]
    assert cli.main(["reproduce", "--folder", str(tmp_path), "--only", "fig99"]) == 2
    assert "no part, table or figure 'fig99'" in capsys.readouterr().err


def test_a_torn_timeline_or_times_file_harms_nothing(tmp_path):
    (tmp_path / "times.json").write_text('{"two-')
    assert read_times(tmp_path) == {}
    (tmp_path / "times.json").write_text(json.dumps(["x"]))
    assert read_times(tmp_path) == {}


def _claimed(record, **metrics):
    steps = len(record.steps)
    return replace(record, metrics={**record.metrics, **{name: [value] * steps for name, value in metrics.items()}})


def test_claims_of_the_suites_fail_when_the_feature_is_off():
    base = session()[0]
    everything = _claimed(
        base, lookup_ms=10.0, exposed_lookup_ms=10.0, communication_ms=9.0, exposed_communication_ms=9.0
    )
    hidden = _claimed(base, lookup_ms=10.0, exposed_lookup_ms=1.0, communication_ms=9.0, exposed_communication_ms=2.0)
    claims.hides_nothing(everything)
    claims.hides_lookups(hidden)
    claims.hides_communication(hidden)
    for claim, record in (
        (claims.hides_lookups, everything),
        (claims.hides_communication, everything),
        (claims.hides_nothing, hidden),
    ):
        with pytest.raises(AssertionError):
            claim(record)
    with pytest.raises(AssertionError, match="bytes"):
        claims.sends_less(base, base)
    claims.trains_alike(base, base)
    with pytest.raises(AssertionError, match="losses differ"):
        claims.trains_alike(replace(base, losses=[3.0, 2.9, 2.8001]), base)
    with pytest.raises(AssertionError, match="does not move"):
        claims.trains_alike(base, replace(base, losses=[3.0, 3.0, 3.0]))
    with pytest.raises(AssertionError):
        claims.parts_sum_to_step(_claimed(base, dense_ms=1.0))


def test_store_writes_what_the_plan_finds(tmp_path, ran):
    part = find_part("sizes", Options())
    measure.run_part(part, tmp_path)
    assert len(Store(tmp_path / "records" / "sizes").read()[0]) == sum(len(c.method_names) for c in part.runs)


def test_a_timeline_shows_two_usual_steps(tmp_path):
    record = measured("nestpipe", [20.0, 10.0, 10.0, 10.0, 90.0, 10.0])  # two rounds of three steps
    assert measure._usual_step(record) == record.steps[2]
