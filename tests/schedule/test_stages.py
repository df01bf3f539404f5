"""A stage has everything under one letter. If something is missing, one line says what."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe import cli
from nestpipe.schedule.building import op, schedule
from nestpipe.schedule.stages import BATCH_RINGS, GLOBALS, MICRO_RINGS, STAGES, Stage
from nestpipe.schedule.templates import nestpipe
from nestpipe.schedule.text import load, to_text
from nestpipe.simulator.calibrate.measure import RATES
from tests.support.engine_runs import Setting, run_engine
from tests.support.stages import what_stages_lack


def test_every_stage_has_a_rule_a_function_a_price_and_a_rate() -> None:
    assert what_stages_lack() == []


def test_every_stage_touches_declared_resources_and_has_a_width_in_drawings() -> None:
    resources = {*BATCH_RINGS, *MICRO_RINGS, *GLOBALS}
    for letter, stage in STAGES.items():
        assert {name.removesuffix("-1") for name in (*stage.reads, *stage.writes)} <= resources, letter
        assert stage.columns > 0 and stage.units > 0, letter


def test_a_stage_of_an_unknown_category_is_refused() -> None:
    with pytest.raises(ValueError, match="stage 'early send': category 'hurry' is not one of dense, update, input"):
        Stage("early send", "early", "hurry", columns=1, units=1, noise=())


@pytest.fixture
def with_z(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file with NestPipe's schedule and a made-up stage Z, which has its own lane."""
    stage = Stage("early send", "early", "communication", ("plan",), ("arrived",), True, columns=2, units=3, noise=())
    monkeypatch.setitem(STAGES, "Z", stage)  # type: ignore[arg-type]
    ops = [op(o.ref.relative()) for o in nestpipe(2).ops]
    path = tmp_path / "with_z.txt"
    path.write_text(to_text(schedule("with-z", 2, [*ops, op("Z.1"), op("Z.2")])))
    return path


def test_a_made_up_stage_gets_one_list_of_what_it_lacks(with_z: Path) -> None:
    assert what_stages_lack() == [
        "Z lacks a rule for the checker, in RULES of nestpipe/checker/staleness.py",
        "Z lacks a function of the engine, in nestpipe/engine/stage_functions.py",
        "Z lacks a price, in stage_seconds of nestpipe/simulator/cost.py",
        "Z lacks a rate (or None), in RATES of nestpipe/simulator/calibrate/measure.py",
    ]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("schedule", "--check"), "lacks a rule for the checker: add it to RULES in nestpipe/checker/staleness.py"),
        (("simulate", "--methods"), "lacks a price for the simulator: add it to stage_seconds in nestpipe/simulator"),
    ],
)
def test_a_command_says_in_one_line_what_a_stage_lacks(with_z: Path, command, message, capsys) -> None:
    name, option = command
    arguments = [name, str(with_z), option] if name == "schedule" else [name, option, str(with_z)]
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"stage Z (early send) {message}" in line


def test_a_made_up_stage_is_drawn(with_z: Path, capsys) -> None:
    assert cli.main(["schedule", str(with_z)]) == 0
    shown = capsys.readouterr().out
    assert "Z.1" in shown and "Z early send" in shown


def test_the_engine_says_what_a_stage_lacks(with_z: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^stage Z \(early send\) lacks a function of the engine: add it to nestpipe/"
    ):
        run_engine(load(with_z), Setting(steps=1))


def test_the_engine_refuses_a_schedule_without_a_required_stage() -> None:
    full = nestpipe(2)
    for letter in {o.ref.stage for o in full.ops if STAGES[o.ref.stage].required != "never"}:
        fewer = [op(o.ref.relative()) for o in full.ops if o.ref.stage != letter]
        with pytest.raises(ValueError, match=f"lacks {letter}"):
            run_engine(schedule("less", 2, fewer), Setting(steps=1))


def test_rates_are_hardware_fields() -> None:
    from nestpipe.simulator.hardware import Hardware

    assert {rate for rate in RATES.values() if rate} <= set(Hardware.__dataclass_fields__)
