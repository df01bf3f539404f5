"""Shared fixtures: rank pools that tests reuse, since ranks are costly to start."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from nestpipe.ranks.pool import RankPool

RunOnRanks = Callable[..., list]


class LazyPool:
    """A RankPool that starts at first use and starts again after a test has broken it."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: RankPool | None = None

    @property
    def pool(self) -> RankPool:
        if self._pool is not None and self._pool.broken:
            self.close()
        if self._pool is None:
            self._pool = RankPool(self.workers, timeout_s=120.0).__enter__()
        return self._pool

    def run(self, function, /, *args, **kwargs) -> list:
        """See RankPool.run."""
        return self.pool.run(function, *args, **kwargs)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.__exit__(None, None, None)
            self._pool = None


def _pool(workers: int) -> Iterator[LazyPool]:
    pool = LazyPool(workers)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool1() -> Iterator[LazyPool]:
    """One rank, for what must not happen in the tests' own process."""
    yield from _pool(1)


@pytest.fixture(scope="session")
def pool2() -> Iterator[LazyPool]:
    """Two ranks: ``pool2.run(function, *args)`` gives the results in rank order."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def pool4() -> Iterator[LazyPool]:
    """Four ranks."""
    yield from _pool(4)


def pytest_configure() -> None:
    """Handle Ctrl-C. A shell that starts us in the background has it ignored, also by every process that we start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what this machine cannot run."""
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root (network namespaces)")
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
