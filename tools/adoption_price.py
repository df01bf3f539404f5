"""What adoption costs a step of torchrec's DLRM: 26 tables, 512 samples a rank, 2 ranks on loopback, one thread each.

    .venv/bin/python tools/adoption_price.py

It prints two things, each as the median over blocks of steps and its quartiles:

- the share of a step in which ids are compared to find their rows, and in which later batches are looked at again,
  with 8 micro-batches and with 1;
- the step time of NestPipeline with one micro-batch, divided by that of TrainPipelineSparseDist. Blocks of both are
  interleaved in one run, on the same ranks and batches.

The first batches, of which each is looked at again, are not counted. A block has 64 steps, so every block has
equally many later looks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchrec.datasets.criteo import DEFAULT_CAT_NAMES
from torchrec.datasets.random import RandomRecDataset
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from nestpipe.adoption.adopted import AdoptedModel
from nestpipe.adoption.lookups import FromEngine
from nestpipe.adoption.pipeline import NestPipeline
from nestpipe.ranks.pool import RankPool
from nestpipe.trainer import SparseOptimizer
from tests.support.example_modules import example

ROWS, DIM, DENSE, SAMPLES = 20_000, 32, 13, 512
RULE = SparseOptimizer("rowwise_adagrad", lr=0.05, eps=1e-8)
#: Steps of a block, a multiple of the distance of later looks. Before the blocks, and of a block, some do not count.
BLOCK, BEFORE, WARM = 64, 36, 3


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Any) -> Spread:
        low, median, high = np.percentile(values, [25, 50, 75])
        return Spread(float(median), float(low), float(high))

    def text(self, form: str) -> str:
        return f"{self.median:{form}} [{self.low:{form}}, {self.high:{form}}]"


def dlrm() -> DLRMTrain:
    tables = [
        EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name=f"t_{name}", feature_names=[name])
        for name in DEFAULT_CAT_NAMES
    ]
    torch.manual_seed(1)
    return DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables), DENSE, [64, DIM], [64, 1]))


def batches() -> Iterator[Any]:
    """Endless: eight batches that were made beforehand, again and again."""
    return iter(
        RandomRecDataset(
            keys=DEFAULT_CAT_NAMES, batch_size=SAMPLES, hash_size=ROWS, ids_per_feature=1, num_dense=DENSE,
            manual_seed=dist.get_rank(), num_batches=None, num_generated_batches=8,
        )
    )  # fmt: skip


def pipeline(micro_batches: int) -> NestPipeline:
    return NestPipeline(dlrm(), lambda p: torch.optim.SGD(p, lr=0.05), RULE, micro_batches=micro_batches)


class Timed:
    """Adds up the seconds in a method of ``owner``, until ``close``; not of calls that come from inside ``outer``."""

    def __init__(self, owner: type, name: str, outer: Timed | None = None) -> None:
        self.seconds, self.running = 0.0, False
        self._owner, self._name, self._before = owner, name, getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if outer is not None and outer.running:
                return self._before(*args, **kwargs)
            began, self.running = time.perf_counter(), True
            try:
                return self._before(*args, **kwargs)
            finally:
                self.seconds, self.running = self.seconds + time.perf_counter() - began, False

        setattr(owner, name, timed)

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def close(self) -> None:
        setattr(self._owner, self._name, self._before)


def shares(micro_batches: int, blocks: int) -> tuple[list[float], list[float], list[float]]:
    """On a rank: by block, the share of comparing ids, the share of later looks, and ms per step.

    Ids that are compared inside a look count as part of the look.
    """
    torch.set_num_threads(1)
    nest, source = pipeline(micro_batches), batches()
    looked = Timed(AdoptedModel, "_look_again")
    compared = Timed(FromEngine, "rows", looked)
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    try:
        for _ in range(BEFORE):
            nest.progress(source)
        for _ in range(blocks):
            compared.take()
            looked.take()
            began = time.perf_counter()
            for _ in range(BLOCK):
                nest.progress(source)
            seconds = time.perf_counter() - began
            for values, value in zip(
                found, (compared.take() / seconds, looked.take() / seconds, seconds / BLOCK * 1e3), strict=True
            ):
                values.append(value)
    finally:
        compared.close()
        looked.close()
        nest.close()
    return found


def step_times(blocks: int) -> tuple[list[float], list[float]]:
    """On a rank: by interleaved block, median ms per step of NestPipeline with N = 1 and of TrainPipelineSparseDist."""
    torch.set_num_threads(1)
    nest, source = pipeline(1), batches()
    _, theirs = example("dlrm_common").torchrec_pipeline(dlrm(), RULE)
    other = batches()
    runs: list[Callable[[], Any]] = [lambda: nest.progress(source), lambda: theirs.progress(other)]
    found: tuple[list[float], list[float]] = ([], [])
    for run in runs:
        for _ in range(BEFORE):
            run()
    for _ in range(blocks):
        for run, values in zip(runs, found, strict=True):
            times = []
            dist.barrier()
            for _ in range(WARM + BLOCK):
                began = time.perf_counter()
                run()
                times.append(time.perf_counter() - began)
            values.append(float(np.median(times[WARM:])) * 1e3)
    nest.close()
    theirs.detach()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6, help="blocks of 64 steps for each number")
    options = parser.parse_args()
    if options.blocks < 1:
        parser.error("--blocks: at least 1")
    with RankPool(2) as pool:
        for micro_batches in (8, 1):
            compared, looked, ms = pool.run(shares, micro_batches, options.blocks)[0]
            both = Spread.of(np.add(compared, looked) * 100)
            print(
                f"{micro_batches} micro-batches: comparing ids {Spread.of(np.multiply(compared, 100)).text('.2f')} %, "
                f"later looks {Spread.of(np.multiply(looked, 100)).text('.2f')} %, together {both.text('.2f')} % of "
                f"{Spread.of(ms).text('.1f')} ms per step"
            )
        ours, theirs = pool.run(step_times, options.blocks)[0]
        print(
            f"1 micro-batch: NestPipeline {Spread.of(ours).text('.1f')} ms per step, TrainPipelineSparseDist "
            f"{Spread.of(theirs).text('.1f')} ms, ratio {Spread.of(np.divide(ours, theirs)).text('.3f')}"
        )


if __name__ == "__main__":
    main()
