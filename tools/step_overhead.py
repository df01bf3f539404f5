"""Step time of the engine against a plain PyTorch loop: one worker, one micro-batch, one intra-op thread, interleaved.

Run it: ``.venv/bin/python tools/step_overhead.py``. Batches are made beforehand, so both loops pay for training alone.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from nestpipe.config import DataConfig, ModelConfig, TrainingConfig
from nestpipe.data.batch import Batch
from nestpipe.datasets.loader import load_dataset
from nestpipe.engine.engine import Engine
from nestpipe.engine.lanes import OneAtATime
from nestpipe.engine.thread_lanes import ThreadLanes
from nestpipe.models.next_item import build_model_spec
from nestpipe.schedule.templates import dbp_only, serial
from nestpipe.trainer import SparseOptimizer
from tests.support.plain_loop import PlainEmbeddings, RowwiseAdagrad

CONFIGS = {
    "dense-heavy": TrainingConfig(
        DataConfig(batch_size=16, negatives=32, data_scale=0.001),
        ModelConfig(embedding_dim=64, width=128, dense_layers=4, sequence_length=50),
    ),
    "embedding-heavy": TrainingConfig(
        DataConfig(batch_size=64, negatives=128, data_scale=0.01),
        ModelConfig(embedding_dim=128, width=16, heads=1, dense_layers=1, sequence_length=20),
    ),
    "short": TrainingConfig(
        DataConfig(batch_size=8, negatives=8, data_scale=0.0002),
        ModelConfig(embedding_dim=16, width=16, heads=1, dense_layers=1, sequence_length=10),
    ),
}


@dataclass(frozen=True)
class Overhead:
    """Median step times in ms; ``ratio`` and its quartiles are over interleaved blocks."""

    plain_ms: float
    engine_ms: float
    ratio: float
    quartiles: tuple[float, float]


def plain_step(training: TrainingConfig, batches: Iterator[Batch]) -> Callable[[], float]:
    dataset = load_dataset(training.data, training.model, training.seed)
    spec = build_model_spec(training, dataset)
    model = spec.build(PlainEmbeddings(spec.tables, training.seed))
    options = training.optimizer
    sparse = RowwiseAdagrad([t.weight for t in model.embeddings.tables.values()], options.sparse_lr, options.sparse_eps)
    dense = torch.optim.Adam(model.dense.parameters(), lr=options.dense_lr)

    def step() -> float:
        batch = next(batches)
        loss = model(batch).sum() / batch.global_samples
        loss.backward()
        sparse.step()
        dense.step()
        dense.zero_grad()
        return loss.item()

    return step


def engine_step(
    training: TrainingConfig, batches: Iterator[Batch], pipelined: bool
) -> tuple[Callable[[], float], Engine]:
    dataset = load_dataset(training.data, training.model, training.seed)
    options = training.optimizer
    engine = Engine(
        dbp_only() if pipelined else serial(),
        build_model_spec(training, dataset),
        SparseOptimizer(options.sparse_optimizer, options.sparse_lr, options.sparse_eps),
        lambda parameters: torch.optim.Adam(parameters, lr=options.dense_lr),
        training.seed,
        lanes=ThreadLanes if pipelined else OneAtATime,
    )
    return lambda: engine.progress(batches).loss, engine


def measure(training: TrainingConfig, blocks: int = 12, steps: int = 10, pipelined: bool = True) -> Overhead:
    """Interleaved blocks of ``steps`` steps; the first steps of each block are not counted."""
    torch.set_num_threads(1)
    dataset = load_dataset(training.data, training.model, training.seed)
    pool = list(itertools.islice(dataset.batches(0, 1), 24))
    plain = plain_step(training, itertools.cycle(pool))
    engine, trainer = engine_step(training, itertools.cycle(pool), pipelined)
    times: dict[str, list[float]] = {"plain": [], "engine": []}
    for _ in range(blocks):
        for name, step in (("plain", plain), ("engine", engine)):
            for warm in range(steps + 4):
                began = time.perf_counter()
                step()
                if warm >= 4:
                    times[name].append(time.perf_counter() - began)
    trainer.close()
    each = {name: np.median(np.reshape(values, (blocks, steps)), axis=1) * 1e3 for name, values in times.items()}
    ratios = each["engine"] / each["plain"]
    low, high = np.percentile(ratios, [25, 75])
    return Overhead(
        float(np.median(each["plain"])), float(np.median(each["engine"])), float(np.median(ratios)), (low, high)
    )


if __name__ == "__main__":
    for name, training in CONFIGS.items():
        for pipelined in (True, False):
            got = measure(training, pipelined=pipelined)
            print(
                f"{name:>16} {'dbp-only' if pipelined else 'serial':>9}: plain {got.plain_ms:7.2f} ms, engine "
                f"{got.engine_ms:7.2f} ms, ratio {got.ratio:.3f} [{got.quartiles[0]:.3f}, {got.quartiles[1]:.3f}], "
                f"difference {got.engine_ms - got.plain_ms:+.2f} ms"
            )
