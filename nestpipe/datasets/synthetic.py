"""Histories with the real shape of KuaiRand-27K: how long they are and how skewed the videos' popularity is.

Lengths follow the data set's percentiles of interactions per user, and popularity follows its histogram
of exposures per video (Gao et al., CIKM 2022; see kuairand27k/ATTRIBUTION.md). The aggregates say nothing
else; the rest is made up, so that there is something to learn. Items fall into interest clusters and,
inside a cluster, into small groups of similar popularity. A user has a few interests, stays with one of
them for a session and with one group for a run of items. Choices at each level are proportional to
popularity, so that the histogram is preserved.

Position p of user u is a function of (seed, u, p), so any part of any history is drawn independently.
"""

from __future__ import annotations

import json
from importlib.resources import files

import numpy as np

from nestpipe.config import DataConfig
from nestpipe.data import counter_random as draws
from nestpipe.data.dataset import Histories, Reader, flat_ranges

_GROUP = 16  # items per group
_SESSION, _RUN = 24, 6  # consecutive positions that share an interest, a group
_INTERESTS = np.array([0.6, 0.9])  # cumulative: sessions of the user's first, second (else third) interest
_IN_GROUP, _IN_CLUSTER = 0.7, 0.9  # cumulative: an item is from the group, the cluster, or else from all items
_FIRST_SECOND, _SECONDS = 1_649_376_000, 30 * 86_400  # the log runs from 2022-04-08 for a month
_LENGTH, _INTEREST, _WHICH, _OF_GROUP, _OF_ITEM, _SOURCE, _JITTER = range(100, 107)  # purposes of draws


def synthetic_histories(config: DataConfig, seed: int) -> Histories:
    """``config.data_scale`` x the items and interactions of KuaiRand-27K.

    The number of users and the interactions per user each shrink by the square root of ``data_scale``. If only the
    number of users shrank, a small set would be a handful of people who have each seen every video. ``config.users``
    divides the same interactions among more or fewer users.
    """
    usual = max(2, round(27_285 * config.data_scale**0.5))
    items = max(64, round(32_038_693 * config.data_scale))
    users = config.users or usual
    lengths = history_lengths(users, config.data_scale**0.5 * usual / users, seed)
    read = _reader(items, config.interest_clusters, lengths, seed)
    test_items, _ = read(np.arange(users), lengths - 1, np.ones(users, dtype=np.int64))
    return Histories(items=items, lengths=lengths - 1, test_items=test_items, read=read)


def _resource(name: str) -> str:
    return (files("nestpipe.datasets") / "kuairand27k" / name).read_text(encoding="utf-8")


def history_lengths(users: int, scale: float, seed: int) -> np.ndarray:
    """int64 [users], at least 1: quantiles at evenly spaced ranks, log-linear between the percentiles."""
    percentiles = json.loads(_resource("statistics.json"))["interactions_per_user_percentiles"]
    ranks, values = np.array([float(k) for k in percentiles]), np.array(list(percentiles.values()))
    spread = (np.arange(users) + 0.5) / users * 100
    lengths = np.exp(np.interp(spread, ranks, np.log(values)))
    shuffled = lengths[np.argsort(draws.bits(seed, _LENGTH, np.arange(users)))]
    return np.maximum(1, np.round(shuffled * scale)).astype(np.int64)


def video_exposures(items: int) -> np.ndarray:
    """float64 [items], ascending: the exposure histogram's quantiles at evenly spaced ranks."""
    table = json.loads(_resource("video_exposures.json"))
    exposures, ends = np.array(table["exposures"]), np.cumsum(table["videos"])
    return exposures[np.searchsorted(ends, (np.arange(items) + 0.5) / items * ends[-1])].astype(np.float64)


def _reader(items: int, clusters: int, lengths: np.ndarray, seed: int) -> Reader:
    """``Histories.read`` over items sorted by cluster, then by popularity: clusters and groups are ranges."""
    rng = np.random.default_rng([seed, 27])
    cluster = np.sort(rng.integers(0, clusters, items))
    rank = rng.permutation(items)
    rank = rank[np.lexsort((rank, cluster))]
    mass = np.concatenate([[0.0], np.cumsum(video_exposures(items)[rank])])
    edges = np.searchsorted(cluster, np.arange(clusters + 1))
    ids = rng.permutation(items)  # popularity must not follow the id, or row-wise sharding would be skewed

    def pick(low: np.ndarray, high: np.ndarray, u: np.ndarray) -> np.ndarray:
        """A position in low..high-1, drawn in proportion to popularity."""
        at = np.searchsorted(mass, mass[low] + u * (mass[high] - mass[low]), side="right") - 1
        return np.clip(at, low, high - 1)

    def read(users: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        position, user = flat_ranges(starts, counts), np.repeat(users, counts)
        which = np.searchsorted(_INTERESTS, draws.uniform(seed, _WHICH, user, position // _SESSION), side="right")
        liked = pick(np.zeros_like(user), np.full_like(user, items), draws.uniform(seed, _INTEREST, user, which))
        of = np.searchsorted(edges, liked, side="right") - 1
        low, high = edges[of], edges[of + 1]
        lead = pick(low, high, draws.uniform(seed, _OF_GROUP, user, position // _RUN))
        group = low + (lead - low) // _GROUP * _GROUP
        source = draws.uniform(seed, _SOURCE, user, position)
        in_group, anywhere = source < _IN_GROUP, source >= _IN_CLUSTER
        low = np.where(in_group, group, np.where(anywhere, 0, low))
        high = np.where(in_group, np.minimum(group + _GROUP, high), np.where(anywhere, items, high))
        place = pick(low, high, draws.uniform(seed, _OF_ITEM, user, position))
        pace = _SECONDS / lengths[user]
        seconds = _FIRST_SECOND + ((position + draws.uniform(seed, _JITTER, user, position)) * pace).astype(np.int64)
        return ids[place], seconds

    return read
