"""The plan: what is run for which table and figure, and what the documents and suites say of it."""

from __future__ import annotations

import importlib
import re
import shlex
from dataclasses import replace

import pytest

from nestpipe.commands import run as run_command
from nestpipe.commands import simulate as simulate_command
from nestpipe.training.runs import RunConfig
from results.artefacts import ARTEFACTS
from results.experiments.plan import Options, all_parts, command, find_part, has_record, measured_parts
from tests.support.made_records import measured
from tests.support.paths import ROOT


def test_every_measured_method_is_in_a_suite():
    """So that tables from a benchmark file are those from the stores: no record is in the stores alone."""
    marks = [
        mark
        for path in sorted((ROOT / "suites").glob("test_rq*.py"))
        for value in vars(importlib.import_module(f"suites.{path.stem}")).values()
        for mark in getattr(value, "pytestmark", [])
        if mark.name == "part"
    ]
    for part in measured_parts(Options()):
        wanted = {name for run in part.runs if isinstance(run, RunConfig) for name in run.method_names}
        mine = [mark.kwargs.get("methods") for mark in marks if mark.args == (part.name,)]
        assert None in mine or wanted <= {name for methods in mine for name in methods}, part.name


def test_a_record_of_the_plan_is_found_again():
    config = replace(measured_parts(Options())[0].runs[0], methods="nestpipe", micro_batches=8)
    record = measured("nestpipe", [1.0] * 15, micro_batches=8)
    whole = {**record.config, "steps": config.steps, "rounds": config.rounds}
    record = replace(record, config=whole)
    assert has_record([record], config, "nestpipe")
    for changed in (replace(config, seed=2), replace(config, pace_dense=0.0), replace(config, steps=6)):
        assert not has_record([record], changed, "nestpipe")
    assert not has_record([replace(record, method="serial")], config, "nestpipe")


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", ["two-hosts", "four-hosts", "micro-batches", "sizes", "simulated", "simulated-sizes"])
def test_the_printed_command_gives_the_configuration_of_the_plan(name, monkeypatch, tmp_path):
    seen = []

    def stop(config, *_):
        seen.append(config)
        raise Stop

    for module in (run_command, simulate_command):
        monkeypatch.setattr(module, module.__name__.rpartition(".")[2], stop)
    wanted = find_part(name, Options()).runs
    for config in wanted:
        program, verb, *words = shlex.split(command(config, str(tmp_path / "x")))
        main = {"run": run_command, "simulate": simulate_command}[verb].main
        with pytest.raises(Stop):
            main(words)
        assert program == "nestpipe"
    assert seen == list(wanted)


#: Records of one's own: no part of the plan makes them.
OWN = "records"


def test_every_table_and_figure_has_a_part_that_feeds_it_and_every_part_feeds_one():
    fed = {name for part in all_parts(Options()) for name in part.feeds}
    assert fed == set(ARTEFACTS) - {OWN}


@pytest.mark.parametrize("name", [name for name in ARTEFACTS if name != OWN])
def test_every_table_and_figure_has_a_section_in_the_guide(name):
    """With the command that makes it and the parts that feed it."""
    sections = (ROOT / "REPRODUCE.md").read_text(encoding="utf-8").split("\n### ")[1:]
    (section,) = [text for text in sections if f"Command: `nestpipe reproduce --only {name}`" in text]
    listed = re.search(r"; parts?: ((?:`[a-z0-9-]+`(?:, )?)+)", section)
    assert listed, f"the section of {name} names no parts"
    feeding = {part.name for part in all_parts(Options()) if name in part.feeds}
    assert set(re.findall(r"`([a-z0-9-]+)`", listed[1])) == feeding
