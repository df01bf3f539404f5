"""A model under torchrec's DistributedModelParallel and its train pipeline, from the weights that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from baselines.torchrec.sharding import FUSED, shards
from nestpipe.trainer import SparseOptimizer

CPU = torch.device("cpu")


def train_dmp(
    model: nn.Module,
    batches: Iterable[Any],
    dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    rule: SparseOptimizer,
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses (mean of the ranks' losses), whole tables and dense weights by name. Row-wise tables, the fused kernel."""
    collections = _collections(model)
    start = {}
    for found in collections.values():
        start |= {name: table.weight.detach().clone() for name, table in tables_of(found).items()}
    fused = {"optimizer": FUSED[rule.name], "learning_rate": rule.lr, "eps": rule.eps}
    bags, sequences = EmbeddingBagCollectionSharder(fused_params=fused), EmbeddingCollectionSharder(fused_params=fused)
    processed = FeatureProcessedEmbeddingBagCollectionSharder(bags)
    world = dist.get_world_size()
    plan = {}
    for path, found in collections.items():
        sharder: Any = bags if isinstance(found, EmbeddingBagCollection) else sequences
        if isinstance(found, FeatureProcessedEmbeddingBagCollection):
            sharder = processed
        sharding = {name: row_wise(compute_kernel="fused") for name in tables_of(found)}
        plan[path] = construct_module_sharding_plan(
            found, sharding, sharder=sharder, local_size=world, world_size=world, device_type="cpu"
        )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    dmp = DistributedModelParallel(
        model, env=env, device=CPU, plan=ShardingPlan(plan), sharders=[processed, bags, sequences]
    )
    sharded = [m for m in dmp.modules() if isinstance(m, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)]
    parts = [shard for found in sharded for shard in shards(found)]
    for shard in parts:
        with torch.no_grad():
            shard.weight.copy_(start[shard.table][shard.first : shard.first + len(shard.weight)])
    named = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    optimizers = [dmp.fused_optimizer, KeyedOptimizerWrapper(named, dense)]
    pipeline = TrainPipelineSparseDist(dmp, CombinedOptimizer(optimizers), CPU)
    seen: list[float] = []
    handle = dmp.module.register_forward_hook(lambda m, a, out: seen.append(float(out[0].detach())))
    source = iter(batches)
    try:
        while True:
            pipeline.progress(source)
    except StopIteration:
        pass
    handle.remove()
    losses = torch.tensor(seen, dtype=torch.float64)
    dist.all_reduce(losses)
    tables = {name: torch.zeros_like(weight) for name, weight in start.items()}
    for shard in parts:
        tables[shard.table][shard.first : shard.first + len(shard.weight)] = shard.weight
    for table in tables.values():
        dist.all_reduce(table)
    weights = {_plain(name): p.detach().clone() for name, p in dmp.named_parameters()}
    pipeline.detach()
    return (losses / world).tolist(), tables, weights


def tables_of(collection: Any) -> dict[str, nn.Module]:
    if isinstance(collection, FeatureProcessedEmbeddingBagCollection):
        collection = collection._embedding_bag_collection
    held = collection.embedding_bags if isinstance(collection, EmbeddingBagCollection) else collection.embeddings
    return dict(held.items())


def _collections(model: nn.Module) -> dict[str, Any]:
    """What is sharded: the outermost of nested collections."""
    found: dict[str, Any] = {}
    kinds = (FeatureProcessedEmbeddingBagCollection, EmbeddingBagCollection, EmbeddingCollection)
    for path, module in model.named_modules():
        if isinstance(module, kinds) and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


def _plain(name: str) -> str:
    return name.replace("_dmp_wrapped_module.", "").replace("module.", "")
