"""Options, and runs that the suites share: every part is measured once a session, methods interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from nestpipe.measurement.record import Record
from nestpipe.training.runs import RunConfig
from results.experiments.plan import Options, find_part
from results.experiments.run_part import RUNNER, Runner, run_part
from suites.replay import about

#: What runs the plan under the suites; a plugin can put another one into the configuration's stash.
RUNNER_KEY = pytest.StashKey[Runner]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nestpipe")
    group.addoption(
        "--benchmark", action="store_true", help="measure in full, record and save (default: one tiny round)"
    )
    group.addoption("--workers", type=int, default=2, help="ranks of the small runs, the large have twice as many")
    group.addoption("--testbed", default=None, help="loopback or netns:RATE,DELAY, such as netns:200mbit,1ms (root)")
    group.addoption("--hardware", default="npu-1536-industrial", help="profile of the simulated tables")
    group.addoption("--rounds", type=int, default=3, help="interleaved rounds of the measured runs")
    group.addoption("--folder", type=Path, default=Path("results/out"), help="where records and benchmarks go")


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if not option.benchmark:
        option.benchmark_quiet = True  # one tiny round says nothing about time
        return
    # Saved where `pytest-benchmark compare` finds it, whatever the machine is called.
    if option.benchmark_storage in (None, "file://./.benchmarks"):
        option.benchmark_storage = f"file://{option.folder / 'benchmarks'}"
    option.benchmark_save = option.benchmark_save or "suites"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.benchmark:
        for item in items:
            item.add_marker(pytest.mark.timeout(3600))


def options_of(config: pytest.Config) -> Options:
    """The plan's options as the command line has them; tiny without --benchmark."""
    full = config.option.benchmark
    return Options(
        size="full" if full else "tiny",
        workers=config.option.workers,
        testbed=config.option.testbed or (Options.testbed if full else "loopback"),
        hardware=config.option.hardware,
        rounds=config.option.rounds if full else 1,
    )


@dataclass(frozen=True)
class Point:
    """One method in one run of a part."""

    part: str
    run: int
    method: str


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``@pytest.mark.part(NAME)``: ``point`` is every method of every measured run of that part."""
    marker = metafunc.definition.get_closest_marker("part")
    if marker is None:
        return
    part = find_part(marker.args[0], options_of(metafunc.config))
    only = marker.kwargs.get("methods")
    points, names = [], []
    for i, run in enumerate(part.runs):
        assert isinstance(run, RunConfig)
        for method in run.method_names:
            if only is None or method in only:
                points.append(Point(part.name, i, method))
                names.append(f"{i + 1}-{method}")
    metafunc.parametrize("point", points, ids=names)


Runs = Callable[[str, int], dict[str, Record]]


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """``runs(part, i)``: the records of the part's i-th run by method; measured when first asked for."""
    config = request.config
    options = options_of(config)
    folder = config.option.folder if config.option.benchmark else tmp_path_factory.mktemp("suites")
    done: dict[tuple[str, int], dict[str, Record]] = {}

    def run(part: str, i: int) -> dict[str, Record]:
        if (part, i) not in done:
            whole = find_part(part, options)
            one = replace(whole, runs=(whole.runs[i],))
            records = run_part(one, folder, again=True, runner=config.stash.get(RUNNER_KEY, RUNNER)).records
            done[part, i] = {record.method: record for record in records}
        return done[part, i]

    yield run


@pytest.fixture(scope="session")
def simulated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[Record]]:
    """``simulated(part)``: all records of a simulated part, written to its store as well."""
    config = request.config
    folder = config.option.folder if config.option.benchmark else tmp_path_factory.mktemp("simulated")

    def run(part: str) -> list[Record]:
        runner = config.stash.get(RUNNER_KEY, RUNNER)
        return list(run_part(find_part(part, options_of(config)), folder, again=True, runner=runner).records)

    return run


@pytest.fixture
def record(point: Point, runs: Runs) -> Record:
    """The record of ``point``."""
    return runs(point.part, point.run)[point.method]


def by_method_and_workers(records: list[Record]) -> dict[tuple[str, int], Record]:
    return {(r.method, r.workers): r for r in records}


@pytest.fixture
def simulate_part(simulated: Callable[[str], list[Record]], benchmark: Any) -> Callable[[str, str], list[Record]]:
    """Benchmark the simulation of a part itself: its records go along."""

    def run(part: str, artefact: str) -> list[Record]:
        benchmark.group = f"{artefact}: simulation"
        records = benchmark.pedantic(simulated, args=(part,), rounds=1, iterations=1)
        benchmark.extra_info.update(about([(part, r) for r in records]))
        return records

    return run
