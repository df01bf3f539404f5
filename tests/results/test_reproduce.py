"""Running the plan: what is finished is kept, and the suites' claims fail when a feature is off."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from nestpipe import cli
from nestpipe.commands.reproduce import ReproduceCommand, reproduce
from nestpipe.measurement.record import Store
from nestpipe.measurement.trace import Timeline
from nestpipe.schedule.operations import Ref
from nestpipe.testbed.testbed import TestbedUnavailable
from nestpipe.training.convergence import Curve, curve_config, write_curve
from nestpipe.training.runs import MethodRun
from results.experiments.plan import Options, find_part
from results.experiments.run_part import Runner, run_part
from results.figures.fig6_convergence import QUALITY
from results.report.report import read_times, size_word
from results.sources import sources_from
from suites import claims
from tests.support.made_records import measured, session


class MadeRuns:
    """Runs that would have been started, each answered by a made record."""

    def __init__(self) -> None:
        self.started = []
        self.no_hosts = False
        self.runner = Runner(measure=self.measure)

    def measure(self, config, progress=None):
        self.started.append(config)
        if config.testbed.startswith("netns") and self.no_hosts:
            raise TestbedUnavailable("no namespaces here")
        return [MethodRun(_record(config, name), [_no_timeline()]) for name in config.method_names]


def _record(config, method):
    left_out = ("methods", "workers", "seed", "testbed", "timeout")
    whole = {name: value for name, value in asdict(config).items() if name not in left_out}
    made = measured(method, [2.0, 3.0], workers=config.workers, seed=config.seed)
    return replace(made, config=whole, testbed=config.testbed, paced=config.pace_dense > 0)


def _no_timeline():
    empty = np.zeros((0, 1))
    return Timeline((), (), empty, empty, empty, np.zeros((0, 1), dtype=np.int64))


def test_finished_runs_are_kept_and_an_interrupted_part_resumes(tmp_path):
    made = MadeRuns()
    part = find_part("four-hosts", Options())
    first = replace(part, runs=part.runs[:1])
    assert run_part(first, tmp_path, runner=made.runner).measured == len(part.runs[0].method_names)
    assert len(made.started) == 1
    whole = run_part(part, tmp_path, runner=made.runner)
    assert len(made.started) == len(part.runs), "only the runs that were not there"
    again = run_part(part, tmp_path, runner=made.runner)
    assert len(made.started) == len(part.runs) and again.measured == 0
    assert {r.key for r in again.records} == {r.key for r in whole.records}
    # A method that is lacking costs its whole run: methods are compared within a run.
    next((tmp_path / "records" / "four-hosts").glob("measured-nestpipe-*.json")).unlink()
    run_part(part, tmp_path, runner=made.runner)
    assert len(made.started) == len(part.runs) + 1
    run_part(part, tmp_path, again=True, runner=made.runner)
    assert len(made.started) == 2 * len(part.runs) + 1


def test_without_shaped_hosts_loopback_is_measured_and_said(tmp_path):
    made = MadeRuns()
    made.no_hosts = True
    part = find_part("micro-batches", Options())
    done = run_part(part, tmp_path, runner=made.runner)
    assert {r.testbed for r in done.records} == {"loopback"}
    assert done.notes == ("no namespaces here; measured on loopback instead: links are not shaped",)
    assert [c.testbed for c in made.started] == ["netns:200mbit,1ms", "loopback", "loopback"]
    run_part(part, tmp_path, runner=made.runner)
    assert len(made.started) == 4, "the testbed is tried again, finished runs are not"


def test_the_command_runs_parts_and_reports(tmp_path, capsys):
    made = MadeRuns()
    command = ReproduceCommand(only="fig9", folder=tmp_path, size="tiny", testbed="loopback")
    assert reproduce(command, made.runner) == 0
    assert len(made.started) == 2 and (tmp_path / "report.html").is_file()
    times = read_times(tmp_path)
    assert set(times) == {"simulated-micro-batches", "micro-batches"}
    assert reproduce(command, made.runner) == 0 and len(made.started) == 2
    assert "kept from before" in capsys.readouterr().err
    assert read_times(tmp_path)["micro-batches"] == times["micro-batches"]
    assert cli.main(["reproduce", "--folder", str(tmp_path), "--only", "fig99"]) == 2
    assert "no part, table or figure 'fig99'" in capsys.readouterr().err


def test_a_tiny_report_says_so_whoever_renders_it(tmp_path):
    """On the face of the page, and in every table that holds measured numbers."""
    for name in ("simulated-micro-batches", "micro-batches"):
        run_part(find_part(name, Options(size="tiny")), tmp_path, runner=MadeRuns().runner)
    assert cli.main(["report", "--folder", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "measured (tiny)</title>" in page and "measured (tiny)</h1>" in page
    assert "<h2>Figure 9: micro-batch size (RQ4) (tiny)</h2>" in page
    assert "nestpipe reproduce --size tiny --only fig9" in page
    table = tmp_path / "tables" / "fig9-measured.md"
    assert table.read_text().startswith("**Figure 9: the numbers, measured (tiny)**")
    assert "tiny" not in table.with_name("fig9-simulated.md").read_text()


def test_a_part_is_tiny_if_all_its_runs_are(tmp_path):
    sources = {}
    for sizes in (("tiny",), ("tiny", "full"), ("full",)):
        folder = tmp_path / "-".join(sizes)
        for size in sizes:
            run_part(find_part("micro-batches", Options(size=size)), folder, runner=MadeRuns().runner)
        sources[sizes] = sources_from(folder)
    words = [size_word(found, "micro-batches", "two-hosts") for found in sources.values()]
    assert words == ["tiny", "partly tiny", ""]
    assert size_word(sources["tiny",], "two-hosts") == ""


def test_a_tiny_curve_counts_as_tiny(tmp_path, capsys):
    (config,) = find_part("convergence", Options(size="tiny")).runs
    quality = {metric: [0.1] for metric in QUALITY} | {"users": [10]}
    curve = Curve("torchrec", 1, curve_config(config), (3.0, 2.9, 2.8, 2.7), (4,), quality)
    write_curve(tmp_path / "convergence", curve)
    assert cli.main(["report", "--folder", str(tmp_path), "--only", "fig6"]) == 0
    assert "**Final accuracy and gaps to TorchRec (tiny)**" in capsys.readouterr().out


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


def test_store_writes_what_the_plan_finds(tmp_path):
    part = find_part("sizes", Options())
    run_part(part, tmp_path, runner=MadeRuns().runner)
    assert len(Store(tmp_path / "records" / "sizes").read()[0]) == sum(len(c.method_names) for c in part.runs)


def test_a_stored_timeline_shows_two_usual_steps(tmp_path):
    """Of two rounds of three steps: neither the slow first step nor the outlier."""
    took = [20.0, 10.0, 10.0, 10.0, 90.0, 10.0]
    record = measured("nestpipe", took)
    ends = np.zeros(max(record.steps) + 1)
    ends[record.steps] = took
    ends = np.cumsum(ends)[:, None] / 1e3
    refs = tuple(Ref("F", batch, 0) for batch in range(len(ends)))
    starts = np.concatenate([np.zeros((1, 1)), ends[:-1]])
    lanes = ("compute",) * len(refs)
    timeline = Timeline(refs, lanes, starts, starts, ends, np.zeros(ends.shape, dtype=np.int64))
    runner = Runner(measure=lambda config, progress=None: [MethodRun(record, [timeline])])
    part = find_part("two-hosts", Options())
    run_part(replace(part, runs=part.runs[:1]), tmp_path, runner=runner)
    (path,) = (tmp_path / "timelines" / "two-hosts").iterdir()
    data = json.loads(path.read_text())
    assert data["method"] == "nestpipe" and data["length_ms"] == pytest.approx(20.0)
    assert [span[:2] for span in data["spans"]] == [["F", 0], ["F", 1]]
