"""2D-SP, two-dimensional sparse parallelism (arXiv 2508.03854): real TorchRec, ``DMPCollection``.

Tables are sharded row-wise inside groups of ranks and replicated between the groups, so that All2Alls stay
inside a group. Each group updates its replica by the gradients of its own samples; every ``interval`` batches the
replicas, weights and optimizer state, are averaged over the groups (an AllReduce, the stage D here). Group g of M
holds the ranks r with r mod M = g, DMPCollection's default. With interval k, TorchRec's pipeline synchronises after
the batches 0, k, 2k, ...

With SGD and interval 1 this is plain synchronous training: a replica moves by M times its group's share of the
mean gradient, and the mean over M groups is the whole gradient's step. With AdaGrad, or k > 1, it is not.

**Momentum-scaled row-wise AdaGrad.** Published are its name, its purpose (to make up for what sharding in groups does
to training quality) and that the row-wise accumulator ("momentum") is scaled. The formula here is our interpretation:

    s += mean over the dim of g^2;  w -= lr g / (sqrt(s / c) + eps),  c = number of groups by default.

The reason for this c: a row that only one group sees in a batch has, under plain synchronous training, gradient
g and accumulates g^2. In M groups the group's own gradient is M g, so its s gains M^2 g^2, and averaging the replicas
leaves M g^2 of that. The group's step is M g / (M |g|), and averaging leaves 1/M of it. After many such batches the
step is 1/sqrt(M) of the plain one, and dividing s by M makes them equal. A run confirms this: 40 steps of the tests'
small model on 4 ranks in 2 groups end closest to plain training with c = 2 (the rms difference of the table weights is
0.025; with c = 0.5, 1 and 4 it is 0.053, 0.038 and 0.036). Scaling the accumulator is the same as fbgemm's own rule
with lr sqrt(c) and eps sqrt(c), so the fused kernel is used unchanged.

On CUDA, DMPCollection is used unmodified. On a CPU it refuses to start. ``_OnCpu`` is the smallest subclass that runs:
a CUDA device gets it past its assertion, the CPU replaces that device before process groups are made, and placements
lose their device index, because a CPU has none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from baselines.torchrec.sharding import CPU, Distributed, fused_sharder, row_wise_plan
from baselines.torchrec.trainer import TorchRecTrainer
from nestpipe.embedding.replica_groups import check_groups
from nestpipe.embedding.sparse_optimizers import momentum_scaled
from nestpipe.trainer import DenseOptimizer, ModelSpec, SparseOptimizer

# The trainer's module has checked the versions.
from torch.distributed.remote_device import _remote_device  # isort: skip
from torchrec.distributed.model_parallel import DMPCollection  # isort: skip
from torchrec.distributed.types import ShardingPlan  # isort: skip


class _OnCpu(DMPCollection):
    """DMPCollection on a CPU; see the module's docstring."""

    device = property(lambda self: CPU, lambda self, _: None)

    def _create_process_groups(self, *args: Any, **options: Any) -> Any:
        self._device = CPU
        return super()._create_process_groups(*args, **options)

    def _remap_sharding_plan(self, plan: ShardingPlan, *args: Any, **options: Any) -> None:
        super()._remap_sharding_plan(plan, *args, **options)
        for parameters in plan.plan.values():
            for parameter in parameters.values():
                for shard in parameter.sharding_spec.shards:
                    shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")


def two_d_sp_trainer(
    spec: ModelSpec,
    sparse_optimizer: SparseOptimizer,
    dense_optimizer: DenseOptimizer,
    seed: int,
    groups: int,
    interval: int = 1,
    scale: float | None = None,
    observe: bool = True,
) -> TorchRecTrainer:
    """A Trainer on all ranks in ``groups`` groups, whose replicas are averaged every ``interval`` batches. Collective.

    ``scale``: the c of momentum-scaled AdaGrad, None for the number of groups. ``table`` returns the replica of the
    rank's own group. Raises ValueError if the ranks cannot be split into such groups.
    """
    check_groups(dist.get_world_size(), groups)
    return TorchRecTrainer(
        spec,
        momentum_scaled(sparse_optimizer, groups if scale is None else scale),
        dense_optimizer,
        seed,
        name="2d-sp",
        observe=observe,
        distribute=partial(_replicated, groups=groups),
        sync_interval=interval,
    )


def _replicated(
    model: nn.Module, optimizer: SparseOptimizer, group: dist.ProcessGroup, groups: int, device: torch.device = CPU
) -> Distributed:
    ranks = dist.get_world_size(group)
    sharder = fused_sharder(optimizer)
    kind = DMPCollection if device.type == "cuda" else _OnCpu
    with _without_warnings():
        dmp = kind(
            model,
            torch.device("cuda"),
            row_wise_plan(model, sharder, ranks // groups),
            world_size=ranks,
            sharding_group_size=ranks // groups,
            global_pg=group,
            sharders=[sharder],
        )
    return Distributed(dmp, dmp._default_ctx.sharding_pg)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """DMPCollection announces its groups as warnings of the root logger."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
