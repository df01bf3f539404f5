"""Which memory the engine uses, the state that it returns, and lanes that a reader wrote."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from nestpipe.embedding.memory import Memory
from nestpipe.engine.engine import Engine
from nestpipe.engine.lanes import OneAtATime
from nestpipe.schedule.operations import Ref, Schedule
from nestpipe.schedule.templates import nestpipe, serial
from tests.support.engine_runs import (
    SPEC,
    TABLES,
    Setting,
    add_weights,
    differences,
    run_engine,
    train,
    without_synchronisation,
)
from tests.support.paths import ROOT


def make_engine(schedule: Schedule, setting: Setting, **options) -> Engine:
    return Engine(schedule, SPEC, setting.sparse_optimizer, setting.dense_optimizer, 3, **options)


@dataclass(frozen=True)
class PoisonedMemory(Memory):
    """Fresh memory contains NaN. ``shapes``: those of all requests."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self.shapes.append(shape)
        return torch.full(shape, math.nan, dtype=dtype)


def test_nothing_reads_memory_that_no_stage_has_written() -> None:
    setting = Setting()
    memory = PoisonedMemory()
    engine = make_engine(nestpipe(4), setting, memory=memory)
    try:
        outcome = add_weights(train(engine, iter(setting.batches(0)), None), engine)
    finally:
        engine.close()
    assert differences(outcome, run_engine(serial(4), setting, overlap=False)) == []
    assert memory.shapes


def test_row_buffers_are_reused_once_they_have_grown() -> None:
    setting, memory = Setting(epochs=2), PoisonedMemory()
    engine = make_engine(nestpipe(4), setting, memory=memory)
    try:
        train(engine, iter(setting.batches(0)), None)
        grown = len(memory.shapes)
        train(engine, iter(setting.batches(0)), None)  # on one rank received rows are gathered and not exchanged
    finally:
        engine.close()
    assert len(memory.shapes) == grown


@pytest.mark.parametrize("folder", ["engine", "embedding"])
def test_only_memory_allocates(folder: str) -> None:
    found = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "nestpipe" / folder).glob("*.py")
        if path.name != "memory.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("empty", "zeros", "ones", "full")
        if isinstance(node.value, ast.Name) and node.value.id == "torch"
    ]
    assert found == []


def test_a_state_saved_right_after_loading_is_the_one_that_was_loaded() -> None:
    setting = Setting(steps=12)
    stale = without_synchronisation(2)
    first, second = make_engine(stale, setting), make_engine(stale, setting)
    try:
        source = iter(setting.batches(0))
        train(first, source, 6)
        saved = first.state_dict()
        assert saved["in_flight"]  # these rows were read early, and the batch before has changed them since
        second.load_state_dict(saved)
        again = second.state_dict()
        assert again["step"] == 6 and again["in_flight"].keys() == saved["in_flight"].keys()
        for batch, rows in saved["in_flight"].items():
            assert all(torch.equal(again["in_flight"][batch][name], value) for name, value in rows.items())
        resumed = train(second, iter(setting.batches(0)[6:]), 4)
        assert differences(resumed, train(first, source, 4)) == []
        assert second.state_dict()["in_flight"].keys() == {10}
    finally:
        first.close()
        second.close()


def test_a_table_can_be_loaded_and_read_back_with_its_optimizer_state() -> None:
    setting = Setting(steps=3)
    values = torch.rand(TABLES[1].rows, TABLES[1].dim)
    engine = make_engine(nestpipe(2), setting)
    try:
        item = engine.table("item").clone()
        engine.load_table("user", values)
        assert torch.equal(engine.table("user"), values) and torch.equal(engine.table("item"), item)
        assert not engine.row_state("user").any()
        train(engine, iter(setting.batches(0)), None)
        assert not torch.equal(engine.table("user"), values)
        assert engine.row_state("user").shape == (TABLES[1].rows, 1) and engine.row_state("user").any()
    finally:
        engine.close()


def test_lanes_that_a_reader_wrote_run_the_same_schedule() -> None:
    class Counted(OneAtATime):
        def __init__(self, schedule: Schedule, execute, seen: list[Ref]):
            super().__init__(schedule, lambda ref: (seen.append(ref), execute(ref))[1])

    setting, seen = Setting(steps=5), []
    engine = make_engine(nestpipe(2), setting, lanes=partial(Counted, seen=seen))
    try:
        outcome = add_weights(train(engine, iter(setting.batches(0)), None), engine)
    finally:
        engine.close()
    assert differences(outcome, run_engine(serial(2), setting, overlap=False)) == []
    assert Ref("F", 4, 2) in seen
