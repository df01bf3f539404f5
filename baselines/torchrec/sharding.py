"""How TorchRec's tables are laid out over ranks and what travels between ranks: these differ between its variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.machine.versions import require_torchrec

require_torchrec()

from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection  # noqa: E402
from torchrec.distributed.embedding_types import EmbeddingComputeKernel  # noqa: E402
from torchrec.distributed.fbgemm_qcomm_codec import (  # noqa: E402
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology  # noqa: E402
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation  # noqa: E402
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise  # noqa: E402
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType  # noqa: E402
from torchrec.modules.embedding_configs import EmbeddingConfig  # noqa: E402
from torchrec.modules.embedding_modules import EmbeddingCollection  # noqa: E402

from baselines.torchrec.index_dedup import register  # noqa: E402
from nestpipe.data.tables import TableConfig  # noqa: E402
from nestpipe.embedding.host_table import initial_rows  # noqa: E402
from nestpipe.trainer import SparseOptimizer  # noqa: E402

FUSED = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Distributed:
    """A model that TorchRec has sharded, and the ranks that hold one copy of its tables."""

    dmp: DistributedModelParallel
    sharding_group: dist.ProcessGroup


#: (model, sparse optimizer, all ranks) -> the sharded model. Collective.
Distribute = Callable[[nn.Module, SparseOptimizer, dist.ProcessGroup], Distributed]


def one_dimensional(
    model: nn.Module,
    optimizer: SparseOptimizer,
    group: dist.ProcessGroup,
    planner: bool = False,
    bf16: bool = False,
    dedup: bool = False,
) -> Distributed:
    """Tables sharded over all ranks, row-wise.

    ``planner``: TorchRec's EmbeddingShardingPlanner chooses between row-wise and table-wise, with the
    fused kernel. (Column-wise is left out: row-wise AdaGrad would take its mean over a column shard,
    which is another update rule. The dense kernel crashes on a CPU.)
    ``bf16``: embeddings and their gradients travel in bfloat16 (``QCommsConfig``).
    ``dedup``: ``use_index_dedup``; on a CPU by our kernel, see ``baselines.torchrec.index_dedup``.
    """
    sharder = fused_sharder(optimizer, bf16, dedup)
    ranks = dist.get_world_size(group)
    plan = _planned(model, sharder, group) if planner else row_wise_plan(model, sharder, ranks)
    dmp = DistributedModelParallel(
        model, env=ShardingEnv.from_process_group(group), device=CPU, plan=plan, sharders=[sharder]
    )
    return Distributed(dmp, group)


def fused_sharder(optimizer: SparseOptimizer, bf16: bool = False, dedup: bool = False) -> EmbeddingCollectionSharder:
    """The sharder whose kernel updates rows by ``optimizer`` inside the backward."""
    fused = {"optimizer": FUSED[optimizer.name], "learning_rate": optimizer.lr}
    if optimizer.name != "sgd":
        fused["eps"] = optimizer.eps
    codecs = None
    if bf16:
        config = QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.BF16)
        # On a CPU device torchrec falls back to fp16, because older gloo had no bf16; that of torch 2.13 has it.
        codecs = get_qcomm_codecs_registry(config, device=torch.device("cuda"))
    if dedup:
        register()
    return EmbeddingCollectionSharder(fused_params=fused, qcomm_codecs_registry=codecs, use_index_dedup=dedup)


def row_wise_plan(model: nn.Module, sharder: EmbeddingCollectionSharder, ranks: int) -> ShardingPlan:
    """Every table in equal blocks of rows over ``ranks`` ranks."""
    path, collection = _collection(model)
    tables = {config.name: row_wise(compute_kernel="fused") for config in collection.embedding_configs()}
    plan = construct_module_sharding_plan(
        collection, tables, sharder=sharder, local_size=ranks, world_size=ranks, device_type="cpu"
    )
    return ShardingPlan({path: plan})


def _planned(model: nn.Module, sharder: EmbeddingCollectionSharder, group: dist.ProcessGroup) -> ShardingPlan:
    _, collection = _collection(model)
    allowed = ParameterConstraints(
        sharding_types=[ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value],
        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
    )
    ranks = dist.get_world_size(group)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, compute_device="cpu", local_world_size=ranks),
        storage_reservation=FixedPercentageStorageReservation(percentage=0.15),
        constraints={config.name: allowed for config in collection.embedding_configs()},
    )
    return planner.collective_plan(model, [sharder], group)


def _collection(model: nn.Module) -> tuple[str, EmbeddingCollection]:
    return next((path, m) for path, m in model.named_modules() if isinstance(m, EmbeddingCollection))


@dataclass(frozen=True)
class Shard:
    """This rank's part of a table: its first row, weight [rows here, dim] and optimizer state [rows here], live."""

    table: str
    first: int
    weight: Tensor
    state: Sequence[Tensor]


def shards(collection: ShardedEmbeddingCollection) -> Iterator[Shard]:
    """This rank's shards; a table that is only on other ranks has none."""
    for lookup in collection._lookups:
        for kernel in lookup._emb_modules:
            tables = kernel._config.embedding_tables
            weights = kernel.emb_module.split_embedding_weights()
            states = kernel.emb_module.split_optimizer_states()
            for i, (table, weight) in enumerate(zip(tables, weights, strict=True)):
                first = table.local_metadata.shard_offsets[0]
                yield Shard(table.name, first, weight, list(states[i]) if states else [])


def is_row_wise(collection: ShardedEmbeddingCollection) -> bool:
    return set(collection._sharding_type_to_sharding) == {ShardingType.ROW_WISE.value}


def load_initial_rows(collection: ShardedEmbeddingCollection, tables: Mapping[str, TableConfig], seed: int) -> None:
    """Gives every row the initial value that it has in every other method."""
    with torch.no_grad():
        for shard in shards(collection):
            rows = initial_rows(seed, tables[shard.table], shard.first, shard.first + len(shard.weight))
            shard.weight.copy_(rows)


def collection_of(tables: Sequence[TableConfig]) -> EmbeddingCollection:
    """The collection that is injected into a model: the tables on the meta device, without storage."""
    configs = [
        EmbeddingConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=list(table.features),
        )
        for table in tables
    ]
    return EmbeddingCollection(tables=configs, device=torch.device("meta"))
