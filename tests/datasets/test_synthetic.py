"""The synthetic data keep KuaiRand-27K's shape at any scale, deterministically and lazily."""

import time

import numpy as np
import pytest

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.datasets.loader import load_dataset
from nestpipe.datasets.synthetic import history_lengths, video_exposures


@pytest.fixture(scope="module")
def whole():
    dataset = load_dataset(DataConfig(), ModelConfig(), seed=1)
    users = np.arange(dataset.users)
    return dataset, *dataset.read(users, np.zeros_like(users), dataset.lengths)


def test_default_is_ready_soon():
    started = time.perf_counter()
    next(load_dataset(DataConfig(), ModelConfig(), seed=1).batches(0, 1))
    assert time.perf_counter() - started < 2


def test_items_and_interactions_follow_the_scale(whole):
    dataset, items, _ = whole
    assert dataset.items == 32_039
    assert len(items) == pytest.approx(322_278, rel=0.1)
    lengths = history_lengths(27_285, 1.0, seed=1)
    assert np.median(lengths) == pytest.approx(8_594, rel=0.01)
    assert np.percentile(lengths, 90) == pytest.approx(24_587, rel=0.01)


def test_popularity_is_as_skewed_as_the_real_one(whole):
    dataset, items, _ = whole
    counts = np.sort(np.bincount(items, minlength=dataset.items))[::-1]
    assert counts[: dataset.items // 100].sum() / counts.sum() == pytest.approx(0.441, abs=0.03)
    real = np.sort(video_exposures(dataset.items))[::-1]
    assert real[: dataset.items // 100].sum() / real.sum() == pytest.approx(0.441, abs=0.02)
    assert real.sum() / dataset.items == pytest.approx(322_278_385 / 32_038_693, rel=0.02)


def test_popularity_does_not_follow_the_id(whole):
    dataset, items, _ = whole
    counts = np.bincount(items, minlength=dataset.items)
    eighths = np.array([part.sum() for part in np.array_split(counts, 8)]) / counts.sum()
    assert abs(eighths - 1 / 8).max() < 0.05  # row-wise shards have similar loads, except for a few hot items
    assert abs(np.corrcoef(counts, np.arange(dataset.items))[0, 1]) < 0.02
    assert abs(np.corrcoef(np.log1p(counts[1:]), np.log1p(counts[:-1]))[0, 1]) < 0.02


def test_any_piece_of_a_history_is_the_same_piece(whole):
    dataset, items, times = whole
    first = np.concatenate([[0], np.cumsum(dataset.lengths)])
    for user, start, count in [(0, 0, 1), (5, 3, 2), (17, 1, 0), (400, 2, 9)]:
        piece, when = dataset.read(np.array([user]), np.array([start]), np.array([count]))
        assert piece.tolist() == items[first[user] + start :][:count].tolist()
        assert when.tolist() == times[first[user] + start :][:count].tolist()


def test_time_moves_forward_within_the_month_of_the_log(whole):
    dataset, _, times = whole
    last = np.cumsum(dataset.lengths) - 1
    steps = np.diff(times)
    steps[last[:-1]] = 0
    assert steps.min() >= 0
    assert times.min() >= 1_649_376_000 and times.max() <= 1_649_376_000 + 30 * 86_400


def test_neighbours_in_time_share_interests(whole):
    """Users of one interest see the same items more often than by chance."""
    dataset, items, _ = whole
    owner = np.repeat(np.arange(dataset.users), dataset.lengths)
    followers = {}
    for a, b, same in zip(items[:-1], items[1:], owner[:-1] == owner[1:], strict=True):
        if same:
            followers.setdefault(a, []).append(b)
    often = [f for f in followers.values() if len(f) >= 100]
    concentration = np.mean([np.sort(np.unique(f, return_counts=True)[1])[-20:].sum() / len(f) for f in often])
    counts = np.sort(np.bincount(items))[::-1]
    assert concentration > 3 * counts[:20].sum() / counts.sum()


def test_seeds_differ(whole):
    dataset, items, _ = whole
    other = load_dataset(DataConfig(), ModelConfig(), seed=2)
    assert not np.array_equal(other.read(np.array([0]), np.array([0]), np.array([3]))[0], items[:3])
    again = load_dataset(DataConfig(), ModelConfig(), seed=1)
    assert np.array_equal(again.lengths, dataset.lengths)
    assert np.array_equal(again.test_items, dataset.test_items)


@pytest.mark.parametrize("scale", [1e-9, 1e-5])
def test_tiny_scales_still_make_a_data_set(scale):
    dataset = load_dataset(DataConfig(data_scale=scale), ModelConfig(), seed=1)
    batch = next(dataset.batches(0, 1))
    assert len(batch) >= 1 and (batch.sparse["history"].values() < dataset.items).all()


def test_users_share_the_interactions():
    usual, many = (load_dataset(DataConfig(users=n), ModelConfig(), seed=1) for n in (None, 5000))
    assert many.users == 5000 and many.items == usual.items
    assert many.lengths.sum() + 5000 == pytest.approx(usual.lengths.sum() + usual.users, rel=0.02)
