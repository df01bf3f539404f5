"""Advice: the limiting lane is one of the schedule's own, whatever its name and whatever runs on it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from nestpipe import cli
from nestpipe.checker.rules import check
from nestpipe.methods import find_method
from nestpipe.schedule.templates import nestpipe
from nestpipe.schedule.text import to_text
from nestpipe.simulator.advise import LANES, advise
from nestpipe.simulator.hardware import hardware_to_toml
from nestpipe.simulator.profile import load_profile
from nestpipe.simulator.scenario import ALL, Scenario

H100 = load_profile("h100-ib").hardware


def profile_with(path, **changes) -> str:
    path.write_text(hardware_to_toml(dataclasses.replace(H100, **changes)))
    return str(path)


@pytest.fixture
def host_lane(tmp_path):
    """NestPipe with its retrieval on its own lane, in a file."""
    schedule = nestpipe(4, name="own-lane")
    ops = tuple(dataclasses.replace(o, lane="host") if o.ref.stage == "R" else o for o in schedule.ops)
    path = tmp_path / "own_lane.txt"
    path.write_text(to_text(dataclasses.replace(schedule, ops=ops)))
    return str(path)


def test_a_lane_of_another_name_is_found_to_be_the_limit(tmp_path, host_lane):
    slow = profile_with(tmp_path / "slow.toml", host_bytes_per_s=H100.host_bytes_per_s / 1e4)
    (choice,) = advise(Scenario(hardware=slow, methods=host_lane), 16, reach=1).choices
    assert choice.limited_by == "host" and choice.limits["host"] > 95
    assert choice.limits["compute"] < 5 and choice.limits["rows"] < 5
    assert choice.text == "own-lane(4), limited by lane host"


def test_the_usual_lane_has_its_words(tmp_path):
    slow = profile_with(tmp_path / "slow.toml", host_bytes_per_s=H100.host_bytes_per_s / 1e4)
    (choice,) = advise(Scenario(hardware=slow, methods="nestpipe"), 16, reach=1).choices
    assert choice.limited_by == "rows" and choice.text.endswith("limited by host memory: retrieval and write-back")


@pytest.mark.parametrize("one_link", [False, True])
def test_replica_synchronisation_can_be_the_limit(tmp_path, capsys, one_link):
    """If it shares the All2All's link on a machine, the advice still says which of the two is the limit."""
    slow = profile_with(tmp_path / "slow.toml", replica_sync=1e5, one_link=one_link)
    (choice,) = advise(Scenario(hardware=slow, methods="2d-sp"), 16, reach=1).choices
    assert choice.limited_by == "replicas" and choice.text.endswith("limited by replica synchronisation")
    out = tmp_path / "advice.json"
    words = f"advise --hardware {slow} --methods 2d-sp,nestpipe+2d-sp --workers 16 --reach 1 --json {out}"
    assert cli.main(words.split()) == 0
    assert "replicas 100%" in capsys.readouterr().out
    assert json.loads(out.read_text())["best"]["limited_by_text"] == "replica synchronisation"


def test_every_lane_of_the_papers_methods_has_words():
    assert {op.lane for name in ALL for op in find_method(name).priced_schedule(4).ops} <= set(LANES)


@pytest.mark.parametrize("name", ["uniemb", "2d-sp", "nestpipe"])
def test_the_checker_is_asked_about_the_schedule_that_runs(name):
    (choice,) = advise(Scenario(hardware="h100-ib", methods=name), 16, reach=1).choices
    problems = check(find_method(name).schedule(2))
    assert choice.objection == (str(problems[0]) if problems else "") and choice.synchronous == (not problems)
