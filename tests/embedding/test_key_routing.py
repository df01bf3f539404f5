"""Compares key routing with a reference of dicts and sets, on one to four ranks that exchange in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.tables import TableConfig
from nestpipe.embedding.host_table import shard_layout
from nestpipe.embedding.key_routing import RoutingPlan, route

TABLES = (
    TableConfig("a", rows=10, dim=2, features=("x", "y"), scale=1.0),
    TableConfig("b", rows=3, dim=2, features=("z",), scale=1.0),
)
FEATURES = {"x": 0, "y": 0, "z": 1}
Keys = dict[str, list[int]]


class Desk:
    """A desk on which ranks, each on a thread, put what they send and take what they receive."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.sent: list[list[Tensor]] = [[] for _ in range(ranks)]


class DeskExchange:
    """Replaces ``collectives.Exchange``."""

    def __init__(self, desk: Desk, rank: int) -> None:
        self.desk, self.rank, self.world_size = desk, rank, len(desk.sent)

    def all_to_all(self, target: Tensor, source: Tensor, receive: Sequence[int], send: Sequence[int]) -> None:
        self.desk.sent[self.rank] = list(source.split(list(send)))
        self.desk.barrier.wait()
        pieces = [sent[self.rank] for sent in self.desk.sent]
        assert [len(piece) for piece in pieces] == list(receive)
        target.copy_(torch.cat(pieces))
        self.desk.barrier.wait()


def on_ranks(ranks: int, function: Callable[[DeskExchange], RoutingPlan]) -> list[RoutingPlan]:
    desk, plans, errors = Desk(ranks), {}, []

    def work(rank: int) -> None:
        try:
            plans[rank] = function(DeskExchange(desk, rank))
        except BaseException as error:
            errors.append(error)
            desk.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [plans[rank] for rank in range(ranks)]


def part(keys: Keys) -> Batch:
    """One micro-batch with one sample per key of the longest feature."""
    samples = max(map(len, keys.values()))

    def jagged(values: list[int]) -> Jagged:
        counts = torch.zeros(samples, dtype=torch.int64)
        counts[: len(values)] = 1
        return Jagged(torch.tensor(values, dtype=torch.int64), counts)

    return Batch({name: jagged(values) for name, values in keys.items()}, torch.arange(samples), {})


def key_lists(rows: int) -> st.SearchStrategy[list[int]]:
    ends = st.sampled_from([0, rows - 1])
    return st.lists(st.one_of(ends, st.integers(0, rows - 1)), max_size=6)


MICRO = st.fixed_dictionaries({"x": key_lists(10), "y": key_lists(10), "z": key_lists(3)})


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[Keys]], list[list[Keys]]]:
    """Two consecutive batches, each keys by rank and micro-batch."""
    ranks, micros = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    batch = st.lists(st.lists(MICRO, min_size=micros, max_size=micros), min_size=ranks, max_size=ranks)
    return draw(batch), draw(batch)


def owner_and_row(feature: str, key: int, ranks: int) -> tuple[int, int]:
    """The rank that owns a key, and its local row there: blocks of ceil(rows / ranks), table after table."""
    sizes = [-(-table.rows // ranks) for table in TABLES]
    table = FEATURES[feature]
    return key // sizes[table], sum(sizes[:table]) + key % sizes[table]


def wanted(keys: Keys, ranks: int) -> list[tuple[int, int]]:
    """(owner, local row) of each key, feature after feature."""
    return [owner_and_row(name, key, ranks) for name in FEATURES for key in keys[name]]


@settings(max_examples=60, deadline=None)
@given(batches())
def test_plans_agree_with_dicts_and_sets(two: tuple[list[list[Keys]], list[list[Keys]]]) -> None:
    torch.set_num_threads(1)
    ranks, micros = len(two[0]), len(two[0][0])
    layout = shard_layout(TABLES, ranks)
    before: list[RoutingPlan | None] = [None] * ranks
    rows_before: list[list[int]] = [[] for _ in range(ranks)]
    for number, batch in enumerate(two):
        parts = [[part(keys) for keys in rank] for rank in batch]
        plans = on_ranks(ranks, lambda x: route(parts[x.rank], False, layout, x, before[x.rank]))  # noqa: B023
        asked = [[wanted(keys, ranks) for keys in rank] for rank in batch]
        for r, plan in enumerate(plans):
            mine = sorted({row for rank in asked for keys in rank for owner, row in keys if owner == r})
            assert plan.rows.tolist() == mine
            assert not plan.ended
            assert plan.global_samples == sum(len(p) for rank in parts for p in rank)
            for m in range(micros):
                micro, keys = plan.micro[m], asked[r][m]
                distinct = sorted(set(keys))
                assert micro.receive == tuple(sum(o == peer for o, _ in distinct) for peer in range(ranks))
                # What arrives, in order: the rows that each owner's send_index names.
                arriving = []
                for peer in range(ranks):
                    theirs = plans[peer].micro[m]
                    start = sum(theirs.send[:r])
                    places = theirs.send_index[start : start + theirs.send[r]].tolist()
                    arriving += [(peer, int(plans[peer].rows[place])) for place in places]
                assert sorted(arriving) == distinct
                assert [arriving[i] for i in micro.inverse.tolist()] == keys
            once = {key for keys in asked[r] for key in keys}
            many = [key for keys in asked[r] for key in set(keys)]
            assert (plan.travelling, plan.distinct) == (len(many), len(once))
            assert plan.remote == sum(owner != r for owner, _ in many)
            assert plan.minimum_remote == sum(owner != r for owner, _ in once)
            common = sorted(set(mine) & set(rows_before[r])) if number else []
            assert [mine[i] for i in plan.shared.tolist()] == common
            assert [rows_before[r][i] for i in plan.shared_before.tolist()] == common
            before[r], rows_before[r] = plan, mine


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_batch_ends_when_no_rank_has_data(ranks: int) -> None:
    layout = shard_layout(TABLES, ranks)
    empty, some = part({"x": [], "y": [], "z": []}), part({"x": [1], "y": [2], "z": [0]})
    assert all(p.ended for p in on_ranks(ranks, lambda x: route([empty] * 2, True, layout, x, None)))
    last = ranks - 1
    plans = on_ranks(ranks, lambda x: route([some if x.rank == last else empty] * 2, x.rank != last, layout, x, None))
    assert not any(p.ended for p in plans)
    assert {p.global_samples for p in plans} == {2}
    for p in on_ranks(ranks, lambda x: route([empty] * 2, False, layout, x, None)):
        assert not p.ended
        assert p.rows.tolist() == p.micro[1].inverse.tolist() == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("feature", "key", "table", "last"),
    [("x", -1, "a", 9), ("y", 10, "a", 9), ("z", 3, "b", 2), ("x", 2**63 - 1, "a", 9), ("z", -(2**63), "b", 2)],
)
def test_a_key_outside_its_table_is_named(ranks: int, feature: str, key: int, table: str, last: int) -> None:
    keys = {"x": [1, 9], "y": [0], "z": [2]}
    keys[feature] = [*keys[feature], key]
    layout = shard_layout(TABLES, ranks)
    with pytest.raises(ValueError) as caught:
        on_ranks(ranks, lambda x: route([part(keys)], False, layout, x, None))
    assert str(caught.value) == f"feature '{feature}' holds key {key}, but table '{table}' has rows 0..{last}"
