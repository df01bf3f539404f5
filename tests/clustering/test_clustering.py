"""Key-centric clustering: legal parts, fewer keys, and the same result from C and from numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.clustering import clustering as clustering_module
from nestpipe.clustering.clustering import batch_pins, cluster, cluster_batch, clustered, distinct_keys
from nestpipe.engine.engine import Engine
from nestpipe.machine.native import library
from nestpipe.schedule.templates import nestpipe, serial
from tests.support.engine_runs import SPEC, Setting, add_weights, make_batches, train

SOURCE = Path(clustering_module.__file__).with_name("clustering.c")


def pins(lists: list[list[list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Keys and offsets of ``lists[feature][sample]``."""
    flat = [key for feature in lists for sample in feature for key in sample]
    offsets, at = [], 0
    for feature in lists:
        counts = [len(sample) for sample in feature]
        offsets.append(np.cumsum([at, *counts]))
        at = int(offsets[-1][-1])
    return np.array(flat, dtype=np.int64), np.stack(offsets).astype(np.int64)


def of_interests(samples: int, groups: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples with 12 of the 40 keys of their group and 4 of 500 common keys."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(samples) % groups
    own = [list(1000 + 40 * g + rng.choice(40, 12, replace=False)) for g in group]
    return pins([own, [list(rng.integers(0, 500, 4)) for _ in group]])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda n: st.lists(
            st.lists(st.lists(st.integers(0, 12), max_size=6), min_size=n, max_size=n), min_size=1, max_size=3
        )
    ),
    st.integers(1, 9),
)
def test_c_and_numpy_give_the_same_parts_of_the_right_sizes(lists, parts):
    keys, offsets = pins(lists)
    part = cluster(keys, offsets, parts, native=False)
    sizes = np.bincount(part, minlength=parts)
    assert sizes.sum() == len(lists[0]) and sizes.max() - sizes.min() <= 1 and (np.diff(sizes) <= 0).all()
    if library(SOURCE) is not None:
        assert np.array_equal(part, cluster(keys, offsets, parts))


def test_a_user_without_a_home_folder_gets_the_slower_numpy_form(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(UserWarning, match="Could not determine home directory.*slower numpy form"):
        assert library.__wrapped__(SOURCE) is None


def test_dense_batches_get_a_second_start():
    """Every sample has 25 of 60 keys, so a key has more than 12 samples."""
    rng = np.random.default_rng(3)
    keys, offsets = pins([[list(rng.permutation(60)[:25]) for _ in range(64)]])
    both = cluster(keys, offsets, 16)
    assert np.array_equal(both, cluster(keys, offsets, 16, native=False))
    alone = []
    for penalty in (0.5, 1.0):
        alone.append(distinct_keys(keys, offsets, cluster(keys, offsets, 16, penalties=(penalty,))))
    assert distinct_keys(keys, offsets, both) == min(alone) and alone[0] != alone[1]


@pytest.mark.parametrize("parts", [2, 8, 16])
def test_finds_the_groups(parts):
    keys, offsets = of_interests(128, 8, seed=parts)
    random = np.random.default_rng(0).permutation(128) % parts
    assert distinct_keys(keys, offsets, cluster(keys, offsets, parts)) < 0.75 * distinct_keys(keys, offsets, random)


def test_objective_counts_each_key_once_per_part():
    keys, offsets = pins([[[1, 1, 2], [2], [1], [3]], [[], [2], [], [3, 4]]])
    assert distinct_keys(keys, offsets, np.array([0, 0, 1, 1])) == 2 + 3


def test_exchange_never_adds_keys():
    keys, offsets = of_interests(96, 5, seed=1)
    costs = [distinct_keys(keys, offsets, cluster(keys, offsets, 8, passes=n)) for n in range(5)]
    assert costs == sorted(costs, reverse=True) and costs[-1] < costs[0]


def test_a_batch_keeps_its_samples_whole():
    batch = make_batches(1, samples=33)[0]
    after = cluster_batch(batch, SPEC.tables, 4)
    assert sorted(after.sample_ids.tolist()) == list(range(33))
    assert torch.equal(after.extra["label"], batch.extra["label"][after.sample_ids])
    before = batch.select(after.sample_ids)
    assert all(torch.equal(before.sparse[f].flat, after.sparse[f].flat) for f in batch.sparse)


def test_tables_do_not_share_keys():
    batch = make_batches(1)[0]
    keys, offsets = batch_pins(batch, SPEC.tables)
    who = offsets[[f for t in SPEC.tables for f in t.features].index("who")]
    assert keys[who[0] : who[-1]].min() >= SPEC.tables[0].rows


@pytest.mark.parametrize("samples", [0, 1, 3, 4])
def test_small_batches_pass_through(samples):
    batch = make_batches(1, samples=samples)[0]
    assert cluster_batch(batch, SPEC.tables, 4) is batch


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_training_is_the_same_to_tolerance_and_moves_fewer_keys(micro_batches):
    """Invariant 2: training with clustering equals training without it."""
    torch.set_num_threads(1)
    setting = Setting(steps=15, samples=40)

    def run(schedule, cluster_into):
        engine = Engine(schedule, SPEC, setting.sparse_optimizer, setting.dense_optimizer, seed=3)
        batches = iter(setting.batches(0))
        if cluster_into > 1:
            batches = clustered(batches, SPEC.tables, cluster_into)
        try:
            start = engine.table("item").clone()
            outcome = add_weights(train(engine, batches, None), engine)
        finally:
            engine.close()
        return outcome, start

    off, start = run(serial(1), 1)
    on, _ = run(nestpipe(micro_batches), micro_batches)
    moved = (off.tensors["table item"] - start).abs().max()
    assert moved > 1e-2
    for name in off.tensors:
        if name.startswith(("table", "dense score", "dense hidden")):
            assert (on.tensors[name] - off.tensors[name]).abs().max() <= 1e-4 * moved, name
    assert np.allclose(on.losses, off.losses, rtol=1e-5)
