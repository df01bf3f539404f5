"""What every data set promises about its batches: determinism, shards, resuming."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.data import Batch, Dataset
from nestpipe.data import counter_random as draws
from nestpipe.datasets.loader import load_dataset


def dataset_of(histories: list[list[int]], batch_size: int = 4, windows: str = "last", seed: int = 1, length: int = 3):
    """A data set of given training histories; timestamps are positions."""
    first = np.concatenate([[0], np.cumsum([len(h) for h in histories])])
    flat = np.array([x for h in histories for x in h], dtype=np.int64)

    def read(users, starts, counts):
        where = np.concatenate(
            [np.arange(first[u] + s, first[u] + s + c) for u, s, c in zip(users, starts, counts, strict=True)]
            or [np.zeros(0, dtype=np.int64)]
        ).astype(np.int64)
        return flat[where], where

    return Dataset(
        items=100, lengths=np.array([len(h) for h in histories]), read=read, seed=seed,
        test_items=np.full(len(histories), 7), batch_size=batch_size, negatives=5, sequence_length=length,
        windows=windows,
    )  # fmt: skip


def rows(batch: Batch) -> list[tuple]:
    """One comparable tuple per sample: id, history, times, negatives."""
    history, times = batch.sparse["history"], batch.extra["timestamps"]
    ends = history.offsets().tolist()
    assert torch.equal(batch.sparse["negatives"].values(), batch.extra["negative_ids"].flatten())
    assert torch.equal(history.values(), batch.extra["history_ids"].values())
    return [
        (
            int(batch.sample_ids[i]),
            tuple(history.values()[ends[i] : ends[i + 1]].tolist()),
            tuple(times.values()[ends[i] : ends[i + 1]].tolist()),
            tuple(batch.extra["negative_ids"][i].tolist()),
        )
        for i in range(len(batch))
    ]


def epoch(dataset: Dataset, world_size: int = 1, **options) -> list[list[tuple]]:
    """Global batches: the ranks' samples joined."""
    ranks = [list(dataset.batches(r, world_size, **options)) for r in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    joined = []
    for parts in zip(*ranks, strict=True):
        joined.append([row for part in parts for row in rows(part)])
        assert {part.global_samples for part in parts} == {len(joined[-1])}
    return joined


HISTORIES = [[i, i + 1, i + 2, i + 3, i + 4][: i % 6] for i in range(19)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 40), st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from(["last", "all"]))
def test_ranks_share_a_global_batch_that_does_not_depend_on_their_number(users, world_size, windows):
    if users == 0:
        return
    histories = (HISTORIES * 3)[:users]
    alone = epoch(dataset_of(histories, batch_size=12, windows=windows), epochs=2)
    together = epoch(dataset_of(histories, batch_size=12 // world_size, windows=windows), world_size, epochs=2)
    assert together == alone


def test_a_rank_may_be_left_without_samples_and_still_takes_part():
    parts = [list(dataset_of([[1, 2]], batch_size=2).batches(r, 4, epochs=1)) for r in range(4)]
    assert [len(p) for p in parts] == [1] * 4
    assert sorted(len(p[0]) for p in parts) == [0, 0, 0, 1]


@pytest.mark.parametrize("start", [0, 1, 4, 5, 6, 12])
def test_resuming_gives_the_batches_that_a_run_from_the_start_gives(start):
    dataset = dataset_of(HISTORIES)
    assert epoch(dataset, 2, start_step=start, epochs=3) == epoch(dataset, 2, epochs=3)[start:]


def test_epochs_cover_all_samples_in_another_order_with_other_negatives():
    batches = epoch(dataset_of(HISTORIES), epochs=2)
    half = len(batches) // 2
    first, second = ([row for batch in part for row in batch] for part in (batches[:half], batches[half:]))
    assert sorted(r[0] for r in first) == sorted(r[0] for r in second) == list(range(19))
    assert [r[0] for r in first] != [r[0] for r in second]
    assert {r[0]: r[1] for r in first} == {r[0]: r[1] for r in second}
    assert {r[0]: r[3] for r in first} != {r[0]: r[3] for r in second}


def test_without_a_number_of_epochs_batches_do_not_end():
    dataset = dataset_of(HISTORIES)
    endless = dataset.batches(0, 1)
    assert len([next(endless) for _ in range(30)]) == 30


def test_the_seed_decides():
    assert epoch(dataset_of(HISTORIES, seed=1), epochs=1) == epoch(dataset_of(HISTORIES, seed=1), epochs=1)
    assert epoch(dataset_of(HISTORIES, seed=1), epochs=1) != epoch(dataset_of(HISTORIES, seed=2), epochs=1)


def test_last_cuts_older_items_and_all_makes_each_item_but_the_first_a_target_once():
    history = list(range(10, 21))
    (only,) = epoch(dataset_of([history], windows="last"), epochs=1)[0]
    assert only[1] == (17, 18, 19, 20)
    pieces = sorted(r[1] for batch in epoch(dataset_of([history], windows="all"), epochs=1) for r in batch)
    assert sorted(target for piece in pieces for target in piece[1:]) == history[1:]
    assert all(len(piece) <= 4 for piece in pieces)


def test_an_empty_history_is_a_sample_without_items():
    (batch,) = dataset_of([[], [1]], windows="all").batches(0, 1, epochs=1)
    assert sorted(batch.sparse["history"].lengths().tolist()) == [0, 1]


def test_draws_are_uniform_and_counters_are_independent():
    u = draws.uniform(1, np.arange(1000)[:, None], np.arange(50)[None, :])
    assert u.shape == (1000, 50) and u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005 and abs(np.histogram(u, 10, (0, 1))[0] / u.size - 0.1).max() < 0.005
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 0.1
    assert len(np.unique(draws.bits(1, np.arange(1000)[:, None], np.arange(50)[None, :]))) == 50_000
    assert np.array_equal(draws.integers(9, 3, 7, np.arange(5)), draws.integers(9, 3, 7, np.arange(5)))
    assert not np.array_equal(draws.bits(1, np.arange(5)), draws.bits(2, np.arange(5)))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (DataConfig, {"data_scale": 0.0}),
        (DataConfig, {"batch_size": 0}),
        (DataConfig, {"negatives": -1}),
        (ModelConfig, {"heads": 3}),
        (ModelConfig, {"sequence_length": 0}),
    ],
)
def test_impossible_settings_are_named(config, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        config(**options)


def test_negatives_cover_the_vocabulary_evenly():
    dataset = load_dataset(DataConfig(negatives=64), ModelConfig(), seed=3)
    drawn = torch.cat([b.extra["negative_ids"].flatten() for b in dataset.batches(0, 1, epochs=1)])
    assert drawn.min() >= 0 and drawn.max() < dataset.items
    tenths = torch.histc(drawn.float(), 10, 0, dataset.items) / len(drawn)
    assert (tenths - 0.1).abs().max() < 0.005
