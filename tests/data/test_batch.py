"""Batch and Jagged: splitting, narrowing and selecting keep every sample whole."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data import Batch, Jagged
from nestpipe.data.keyed_jagged import keyed_jagged_tensor


def make_batch(lists: list[list[int]]) -> Batch:
    counts = torch.tensor([len(x) for x in lists], dtype=torch.int64)
    flat = torch.tensor([x for values in lists for x in values], dtype=torch.int64)
    history = Jagged(flat, counts)
    return Batch(
        sparse={"history": history, "none": Jagged(flat[:0], torch.zeros_like(counts))},
        sample_ids=torch.arange(len(lists)) * 10,
        extra={"times": Jagged(flat * 2, counts), "row": torch.arange(len(lists))[:, None].repeat(1, 3)},
        global_samples=len(lists),
    )


def lists_of(feature: Jagged) -> list[list[int]]:
    ends = feature.offsets().tolist()
    return [feature.values()[a:b].tolist() for a, b in pairwise(ends)]


def check_is(part: Batch, lists: list[list[int]], rows: list[int]) -> None:
    wanted = [lists[r] for r in rows]
    assert len(part) == len(rows)
    assert lists_of(part.sparse["history"]) == wanted
    assert lists_of(part.sparse["none"]) == [[] for _ in rows]
    assert lists_of(part.extra["times"]) == [[2 * x for x in values] for values in wanted]
    assert part.extra["row"].tolist() == [[r] * 3 for r in rows]
    assert part.sample_ids.tolist() == [10 * r for r in rows]
    for feature in part.sparse.values():
        assert feature.flat.dtype == feature.counts.dtype == torch.int64


samples = st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=12)


@settings(max_examples=60, deadline=None)
@given(samples, st.integers(1, 16))
def test_split_gives_every_sample_once_in_order_and_in_sizes_that_differ_by_one(lists, micro_batches):
    parts = make_batch(lists).split(micro_batches)
    sizes = [len(part) for part in parts]
    assert len(parts) == micro_batches and sum(sizes) == len(lists)
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    start = 0
    for part in parts:
        check_is(part, lists, list(range(start, start + len(part))))
        start += len(part)
    assert sum(part.share for part in parts) == pytest.approx(1.0 if lists else 0.0)
    assert all(part.global_samples == len(lists) for part in parts)


@settings(max_examples=60, deadline=None)
@given(samples, st.data())
def test_select_and_narrow_compose(lists, data):
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=15)) if lists else []
    chosen = make_batch(lists).select(torch.tensor(rows, dtype=torch.int64))
    check_is(chosen, lists, rows)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    check_is(chosen.narrow(start, stop), lists, rows[start:stop])
    check_is(chosen.narrow(start, stop).to(torch.device("cpu")), lists, rows[start:stop])


def test_share_of_a_part_of_a_part_multiplies():
    whole = make_batch([[1], [2], [3], [4]])
    assert whole.narrow(0, 2).narrow(0, 1).share == 0.25
    assert whole.narrow(2, 2).share == 0.0


def test_embedded_values_select_by_row():
    embedded = Jagged(torch.arange(12.0).view(6, 2), torch.tensor([2, 0, 4]))
    assert embedded.select(torch.tensor([2, 1])).flat.tolist() == embedded.flat[2:].tolist()


@settings(max_examples=20, deadline=None)
@given(samples)
def test_keyed_jagged_tensor_holds_the_same_features(lists):
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    batch = make_batch(lists)
    keyed = keyed_jagged_tensor(batch.sparse)
    assert keyed.keys() == list(batch.sparse) and keyed.stride() == len(lists)
    if not lists:  # torchrec cannot split a KeyedJaggedTensor without samples
        return
    for name, feature in batch.sparse.items():
        assert torch.equal(keyed[name].values(), feature.values())
        assert torch.equal(keyed[name].lengths(), feature.lengths())
