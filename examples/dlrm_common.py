"""What a TorchRec user already has: torchrec's DLRM, its loss, batches, and a sharding plan for TorchRec."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from criteo import DENSE_FEATURES, FEATURES, criteo_batches, criteo_tables
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from baselines.torchrec.sharding import FUSED, shards
from nestpipe.data.keyed_jagged import keyed_jagged_tensor
from nestpipe.trainer import SparseOptimizer

DIM, ROWS = 16, 2000
CPU = torch.device("cpu")


def dlrm() -> DLRMTrain:
    """torchrec's DLRM, unchanged, with 26 tables of at most ``ROWS`` rows."""
    tables = [
        EmbeddingBagConfig(
            num_embeddings=min(table.rows, ROWS), embedding_dim=DIM, name=table.name, feature_names=list(table.features)
        )
        for table in criteo_tables(DIM)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=CPU)
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=collection,
            dense_in_features=DENSE_FEATURES,
            dense_arch_layer_sizes=[32, DIM],
            over_arch_layer_sizes=[32, 1],
        )
    )


def criteo(rank: int, world: int, batches: int, batch_size: int = 64) -> Iterator[Batch]:
    """torchrec batches of the Criteo-like stream, with keys taken modulo ``ROWS``."""
    for batch in criteo_batches(batch_size, 1, rank, world, batches, most_values=2):
        sparse = keyed_jagged_tensor({f: batch.sparse[f] for f in FEATURES})
        sparse.values().remainder_(ROWS)
        yield Batch(batch.extra["dense"], sparse, batch.extra["label"].int())


def dense_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def bags_of(model: nn.Module) -> EmbeddingBagCollection:
    return next(m for m in model.modules() if isinstance(m, EmbeddingBagCollection))


def sharded_bags(model: nn.Module) -> ShardedEmbeddingBagCollection:
    return next(m for m in model.modules() if isinstance(m, ShardedEmbeddingBagCollection))


def sharded(model: nn.Module, optimizer: SparseOptimizer) -> DistributedModelParallel:
    """``model`` under DistributedModelParallel, with row-wise tables and the fused kernel, not a CPU's default.

    Sharding initialises the tables again. Here they get ``model``'s weights, so that both examples start from the
    same ones.
    """
    start = {name: bag.weight.detach().clone() for name, bag in bags_of(model).embedding_bags.items()}
    fused = {"optimizer": FUSED[optimizer.name], "learning_rate": optimizer.lr, "eps": optimizer.eps}
    sharder, world = EmbeddingBagCollectionSharder(fused_params=fused), dist.get_world_size()
    path, collection = next((p, m) for p, m in model.named_modules() if isinstance(m, EmbeddingBagCollection))
    plan = construct_module_sharding_plan(
        collection,
        {config.name: row_wise(compute_kernel="fused") for config in collection.embedding_bag_configs()},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan({path: plan}),
        sharders=[sharder],
    )
    for shard in shards(sharded_bags(dmp)):
        with torch.no_grad():
            shard.weight.copy_(start[shard.table][shard.first : shard.first + len(shard.weight)])
    return dmp


def torchrec_optimizer(model: DistributedModelParallel) -> CombinedOptimizer:
    dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), dense_optimizer)
    return CombinedOptimizer([model.fused_optimizer, dense])


def torchrec_pipeline(
    model: nn.Module, optimizer: SparseOptimizer
) -> tuple[DistributedModelParallel, TrainPipelineSparseDist]:
    dmp = sharded(model, optimizer)
    return dmp, TrainPipelineSparseDist(dmp, torchrec_optimizer(dmp), CPU)
