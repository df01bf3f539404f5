"""``nestpipe run``: train one or several methods on the same model, data and seed, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from nestpipe.config import ConfigError, RunConfig
from nestpipe.datasets.loader import load_dataset
from nestpipe.methods import methods_of
from nestpipe.ranks.pool import RankPool
from nestpipe.ranks.process import RankError
from nestpipe.testbed.testbed import parse_testbed
from nestpipe.training.checkpoint import only_writer
from nestpipe.training.loop import AfterStep, check_resumable, train_on_rank
from nestpipe.training.manifest import CheckpointError
from nestpipe.training.measured_record import MethodRun, method_runs

#: (method, steps done, total steps, loss of rank 0)
Progress = Callable[[str, int, int, float], None]


def run(config: RunConfig, progress: Progress | None = None) -> list[MethodRun]:
    """Train the methods of ``config`` on real rank processes.

    Raises ConfigError, UnknownMethod, DataError, TestbedUnavailable, CheckpointError, MemoryError or RankError.
    """
    methods = methods_of(config)
    # First here, so that an error in the data is reported once, before any rank has started.
    dataset = load_dataset(config.data, config.model, config.seed)
    testbed = parse_testbed(config.testbed)
    check_resumable(config, methods, dataset)

    def on_message(rank: int, message: Any) -> None:
        if progress:
            progress(*message)

    try:
        with (
            only_writer(config.checkpoint),
            RankPool(config.workers, testbed=testbed, timeout_s=config.timeout) as pool,
        ):
            ranks = pool.run(train_on_rank, config, on_message=on_message)
    except RankError as error:
        kind, _, what = error.failures[0].what.partition(": ") if error.failures else ("", "", "")
        if kind == CheckpointError.__name__:  # its one line is the whole message
            raise CheckpointError(what) from None
        if kind.endswith("MemoryError") or "can't allocate memory" in what:
            raise MemoryError(f"rank {error.failures[0].rank}: {what}") from None
        raise
    return method_runs(config, methods, ranks, dataset.notes)


def run_in_group(config: RunConfig, after_step: AfterStep | None = None) -> list[MethodRun] | None:
    """Like ``run``, on ranks that Slurm or torchrun started and that are in a process group. Collective.

    Returns the runs on rank 0 and None on the others. Also raises ConfigError if the group does not have
    ``config.workers`` ranks, and Interrupted if ``after_step`` said stop.
    """
    methods = methods_of(config)
    if dist.get_world_size() != config.workers:
        raise ConfigError(f"{config.workers} workers were asked for, but {dist.get_world_size()} ranks were started")
    result = train_on_rank(config, after_step)
    ranks: list[Any] | None = [None] * config.workers if dist.get_rank() == 0 else None
    dist.gather_object(result, ranks)
    if ranks is None:
        return None
    return method_runs(config, methods, ranks, load_dataset(config.data, config.model, config.seed).notes)
