"""Shards of the host table, buffers and sparse update rules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.data.tables import TableConfig
from nestpipe.embedding.dual_buffer import RowBuffer, synchronise
from nestpipe.embedding.host_table import fill_initial_rows, host_table, initial_rows, shard_layout
from nestpipe.embedding.retrieval_write_back import Rows, empty_rows
from nestpipe.embedding.sparse_optimizers import sparse_update, state_width
from nestpipe.trainer import SparseOptimizer

BIG = TableConfig("big", rows=9001, dim=3, features=("f",), scale=0.25)
SMALL = TableConfig("small", rows=5, dim=3, features=("g",), scale=0.5)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(0, 2**40))
def test_initial_rows_do_not_depend_on_the_sharding(ranks: int, seed: int) -> None:
    layout = shard_layout((BIG, SMALL), ranks)
    whole = {table.name: initial_rows(seed, table, 0, table.rows) for table in layout.tables}
    for rank in range(ranks):
        shard = host_table(layout, rank, seed, 1)
        assert shard.rows.weight.shape == (layout.local_rows, 3)
        assert not shard.rows.state.any()
        for t, table in enumerate(layout.tables):
            start, stop = layout.owned(t, rank)
            mine = shard.rows.weight[layout.base[t] : layout.base[t] + stop - start]
            assert torch.equal(mine, whole[table.name][start:stop])


def test_each_rank_loads_the_rows_that_it_owns_and_other_tables_do_not_change() -> None:
    for rank in range(3):
        layout = shard_layout((BIG, SMALL), 3)
        shard = host_table(layout, rank, 1, 1)
        before = shard.block("big").weight.clone()
        values = torch.rand(SMALL.rows, 3)
        shard.load("small", values)
        start, stop = layout.owned(1, rank)
        assert torch.equal(shard.block("small").weight[: stop - start], values[start:stop])
        assert torch.equal(shard.block("big").weight, before)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.integers(1, 8))
def test_every_row_has_one_owner(rows: list[int], ranks: int) -> None:
    tables = [TableConfig(f"t{n}", r, 2, (f"f{n}",), 1.0) for n, r in enumerate(rows)]
    layout = shard_layout(tables, ranks)
    for t, table in enumerate(tables):
        owned = [row for rank in range(ranks) for row in range(*layout.owned(t, rank))]
        assert owned == list(range(table.rows))
        assert layout.block[t] * ranks >= table.rows
    assert layout.local_rows == sum(layout.block)


def test_initial_rows_depend_on_seed_table_and_row() -> None:
    rows = initial_rows(1, BIG, 0, 9001)
    assert rows.abs().max() < 0.25
    assert rows.std() == pytest.approx(0.25 / 3**0.5, rel=0.02)
    assert len(torch.unique(rows[:, 0])) > 8900
    assert not torch.equal(rows, initial_rows(2, BIG, 0, 9001))
    renamed = TableConfig("other", 9001, 3, ("f",), 0.25)
    assert not torch.equal(rows, initial_rows(1, renamed, 0, 9001))
    piece = torch.empty(200, 3)
    fill_initial_rows(piece, 1, BIG, 4000)  # across the border of two generator blocks
    assert torch.equal(piece, rows[4000:4200])


def test_tables_of_different_dims_are_refused() -> None:
    with pytest.raises(ValueError, match="must share one embedding dimension, got big 3, wide 4"):
        shard_layout((BIG, TableConfig("wide", 5, 4, ("w",), 1.0)), 2)


def filled(count: int, width: int, start: float) -> Rows:
    rows = empty_rows(count, 2, width)
    rows.weight.copy_(torch.arange(count * 2).view(count, 2) + start)
    rows.state.copy_(torch.arange(count * width).view(count, width) - start)
    return rows


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1), st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 3))
def test_buffers_grow_are_reused_and_do_not_overlap(width: int, counts: list[int], slots: int) -> None:
    buffers = [RowBuffer(2, width) for _ in range(slots)]
    address: dict[int, int] = {}
    held: dict[int, Tensor] = {}
    largest: dict[int, int] = {}
    for n, count in enumerate(counts):
        slot = n % slots
        rows = buffers[slot].resize(count)
        assert (len(rows), rows.weight.shape, rows.state.shape) == (count, (count, 2), (count, width))
        if 0 < count <= largest.get(slot, 0):
            assert rows.weight.data_ptr() == address[slot]
        elif count:
            address[slot] = rows.weight.data_ptr()
        largest[slot] = max(count, largest.get(slot, 0))
        rows.weight.fill_(n)
        held[slot] = rows.weight.clone()
        for other, wanted in held.items():
            assert torch.equal(buffers[other].rows.weight, wanted)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)), st.integers(0, 1))
def test_synchronisation_copies_whole_rows_that_both_batches_touch(old: set, new: set, width: int) -> None:
    before, after = sorted(old), sorted(new)
    common = sorted(old & new)
    source, target = empty_rows(len(before), 2, width), empty_rows(len(after), 2, width)
    for rows, start in ((source, 100.0), (target, 900.0)):
        example = filled(len(rows), width, start)
        rows.weight.copy_(example.weight)
        rows.state.copy_(example.state)
    kept = Rows(target.weight.clone(), target.state.clone())
    source_before = source.weight.clone()
    index = torch.tensor([after.index(row) for row in common], dtype=torch.int64)
    index_before = torch.tensor([before.index(row) for row in common], dtype=torch.int64)
    synchronise(target, source, index, index_before)
    for place, row in enumerate(after):
        wanted = (source, before.index(row)) if row in old else (kept, place)
        assert torch.equal(target.weight[place], wanted[0].weight[wanted[1]])
        assert torch.equal(target.state[place], wanted[0].state[wanted[1]])
    assert torch.equal(source.weight, source_before)


@pytest.mark.parametrize("width", [0, 1])
def test_gather_and_scatter_move_weight_and_state(width: int) -> None:
    table, index = filled(6, width, 0.0), torch.tensor([4, 1, 3])
    out = empty_rows(3, 2, width)
    table.gather(index, out)
    assert torch.equal(out.weight, table.weight[index])
    assert torch.equal(out.state, table.state[index])
    untouched = table.weight[[0, 2, 5]].clone()
    table.scatter(index, filled(3, width, 50.0))
    assert torch.equal(table.weight[index], filled(3, width, 50.0).weight)
    assert torch.equal(table.state[index], filled(3, width, 50.0).state)
    assert torch.equal(table.weight[[0, 2, 5]], untouched)


@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_rowwise_adagrad_follows_its_formula(eps: float) -> None:
    rule = SparseOptimizer("rowwise_adagrad", lr=0.3, eps=eps)
    generator = torch.Generator().manual_seed(1)
    rows = Rows(torch.randn(20, 8, generator=generator), torch.zeros(20, state_width(rule, 8)))
    weight, state = rows.weight.double(), torch.zeros(20, 1, dtype=torch.float64)
    for _ in range(30):
        gradient = torch.randn(20, 8, generator=generator)
        state += gradient.double().square().mean(1, keepdim=True)
        weight -= 0.3 * gradient.double() / (state.sqrt() + eps)
        sparse_update(rule, rows, gradient.clone())
    assert torch.allclose(rows.weight.double(), weight, rtol=0, atol=2e-6)
    assert torch.allclose(rows.state.double(), state, rtol=1e-6)


def test_rowwise_adagrad_of_one_element_is_adagrad() -> None:
    rule = SparseOptimizer("rowwise_adagrad", lr=0.1, eps=1e-10)
    rows = Rows(torch.ones(6, 1), torch.zeros(6, 1))
    reference = torch.nn.Parameter(torch.ones(6, 1, dtype=torch.float64))
    optimizer = torch.optim.Adagrad([reference], lr=0.1, eps=1e-10)
    for step in range(10):
        gradient = torch.linspace(-1, 1, 6).view(6, 1) * (step + 1)
        reference.grad = gradient.double()
        optimizer.step()
        sparse_update(rule, rows, gradient)
    assert torch.allclose(rows.weight.double(), reference.detach(), atol=1e-6)


def test_sgd_is_plain_and_a_zero_gradient_changes_nothing() -> None:
    for name in ("sgd", "rowwise_adagrad"):
        rule = SparseOptimizer(name, lr=0.5)
        rows = Rows(torch.ones(3, 2), torch.zeros(3, state_width(rule, 2)))
        sparse_update(rule, rows, torch.zeros(3, 2))
        assert torch.equal(rows.weight, torch.ones(3, 2))
    rows = Rows(torch.ones(3, 2), torch.zeros(3, 0))
    sparse_update(SparseOptimizer("sgd", lr=0.5), rows, torch.full((3, 2), 4.0))
    assert torch.equal(rows.weight, torch.full((3, 2), -1.0))


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown sparse optimizer 'lamb', one of sgd, rowwise_adagrad, adam"):
        state_width(SparseOptimizer("lamb"), 8)
