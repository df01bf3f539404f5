"""How keys repeat, measured by the project's own router on a few workers' batches, then extrapolated.

The sampled workers are threads that exchange through memory: the routing is the one that training uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.data.tables import TableConfig
from nestpipe.datasets.loader import load_dataset
from nestpipe.embedding.host_table import shard_layout
from nestpipe.embedding.key_routing import route
from nestpipe.simulator.workload import KeyStatistics


@dataclass
class MemoryExchange:
    """``collectives.Exchange`` between threads of one process: ``board`` [ranks] holds what each rank sends to each."""

    rank: int
    board: list[Any]
    barrier: Barrier

    @property
    def world_size(self) -> int:
        return len(self.board)

    def all_to_all(self, target: Tensor, source: Tensor, receive: Sequence[int], send: Sequence[int]) -> None:
        self.board[self.rank] = source.split(list(send))
        self.barrier.wait()
        torch.cat([theirs[self.rank] for theirs in self.board], out=target)
        self.barrier.wait()  # no thread may post again before all have read


def measure_keys(
    data: DataConfig,
    model: ModelConfig,
    seed: int,
    worker_counts: Sequence[int] = (1, 2, 4, 8, 16),
    micro_batches: Sequence[int] = (2, 4, 8, 16, 32),
    batches: int = 3,
) -> KeyStatistics:
    """Route ``batches`` consecutive batches of ``data`` on each of ``worker_counts`` workers, unclustered.

    Duplication is the mean over workers and batches for the first of ``worker_counts``. Rows per owner and overlap are
    means over workers and batches, fitted as a power and a logarithm of the workers. ``error`` is that of predicting
    the largest count from the others.
    """
    dataset = load_dataset(data, model, seed)
    rows, overlap = [], []
    keys = distinct = 0.0
    for workers in worker_counts:
        plans = _route(dataset, workers, 1, batches)
        rows.append(float(np.mean([len(p.rows) for rank in plans for p in rank])))
        overlap.append(float(np.mean([len(p.shared) / max(1, len(p.rows)) for rank in plans for p in rank[1:]])))
        if workers == worker_counts[0]:
            keys = float(np.mean([len(p.micro[0].inverse) for rank in plans for p in rank]))
            distinct = float(np.mean([p.distinct for rank in plans for p in rank]))
    duplication = {}
    for n in micro_batches:
        plans = _route(dataset, worker_counts[0], n, batches)
        duplication[n] = float(np.mean([p.travelling / p.distinct for rank in plans for p in rank]))
    exponent, error = _power(worker_counts, np.array(rows) * worker_counts)
    if len(worker_counts) == 1 and worker_counts[0] > 1:
        exponent = 1 + math.log(rows[0] / distinct) / math.log(worker_counts[0])  # exact there
    growth, start = np.polyfit(np.log2(worker_counts), overlap, 1) if len(worker_counts) > 1 else (0.0, overlap[0])
    return KeyStatistics(
        keys_per_sample=keys / data.batch_size,
        distinct_share=distinct / keys,
        duplication=duplication,
        rows_exponent=exponent,
        overlap=float(start),
        overlap_growth=float(growth),
        error=error,
        source=f"measured by the router on {', '.join(map(str, worker_counts))} workers of {data.dataset} data, "
        f"scale {data.data_scale:g}, {data.batch_size} samples of up to {model.sequence_length} items, "
        f"{data.negatives} negatives, seed {seed}",
    )


def _route(dataset: Any, workers: int, micro_batches: int, batches: int) -> list[list[Any]]:
    """Routing plans [workers][batches]."""
    layout = shard_layout([TableConfig("items", dataset.items, 1, ("history", "negatives"), 0.1)], workers)
    board: list[Any] = [None] * workers
    barrier = Barrier(workers)

    def run(rank: int) -> list[Any]:
        try:
            exchange, source = MemoryExchange(rank, board, barrier), dataset.batches(rank, workers)
            plans: list[Any] = []
            for _ in range(batches):
                parts = next(source).split(micro_batches)
                plans.append(route(parts, False, layout, exchange, plans[-1] if plans else None))  # type: ignore[arg-type]
            return plans
        except BaseException:
            barrier.abort()  # otherwise the others would wait for this one forever
            raise

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, range(workers)))


def _power(workers: Sequence[int], totals: np.ndarray) -> tuple[float, float]:
    """Exponent of ``totals`` as a power of ``workers``, and the relative error at the largest, left out of the fit."""
    if len(workers) < 2:
        return 1.0, 0.0
    x, y = np.log(workers), np.log(totals)
    exponent = float(np.polyfit(x, y, 1)[0])
    if len(workers) < 3:
        return exponent, 0.0
    slope, start = np.polyfit(x[:-1], y[:-1], 1)
    return exponent, float(abs(np.exp(slope * x[-1] + start - y[-1]) - 1))
