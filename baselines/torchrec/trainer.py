"""Real TorchRec: DistributedModelParallel, row-wise sharding, fused optimizer, ``TrainPipelineSparseDist`` unmodified.

Its step t does this, in this order, all on the host thread (the letters are those of ``nestpipe.schedule``):

1. K(t+1) starts: bucket the keys, launch the All2All of sizes.
2. P(t+2), H(t+2).
3. Wait for the keys of t (launched in step t-1), R(t), launch E(t); the first use of an embedding waits for it. F(t).
4. K(t+1) continues: wait for the sizes, launch the All2Alls of lengths and keys.
5. B(t); DDP launches A(t) once the last dense gradient is ready; G(t) is launched and waited for; U(t), inside
   backward; wait for A(t).
6. O(t).

So key routing hides behind the previous batch; the embedding and gradient All2Alls do not. ``baselines.registry``
declares this as a schedule.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.machine.versions import require_torchrec

require_torchrec()

from torchrec.distributed.embedding import ShardedEmbeddingCollection  # noqa: E402
from torchrec.distributed.model_parallel import get_unwrapped_module  # noqa: E402
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist  # noqa: E402
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # noqa: E402
from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: E402

from baselines.torchrec.batches import AlignedBatches, KeyedBatch, NoClock  # noqa: E402
from baselines.torchrec.observer import Observer  # noqa: E402
from baselines.torchrec.sharding import (  # noqa: E402
    FUSED,
    Distribute,
    collection_of,
    is_row_wise,
    load_initial_rows,
    one_dimensional,
    shards,
)
from baselines.torchrec.traffic import Traffic  # noqa: E402
from nestpipe.data.batch import Batch  # noqa: E402
from nestpipe.measurement.trace import Span  # noqa: E402
from nestpipe.ranks.collectives import error_on_its_way  # noqa: E402
from nestpipe.trainer import DenseOptimizer, ModelSpec, SparseOptimizer, StepResult  # noqa: E402

# torchrec itself calls what torch has deprecated. Users cannot fix that, and every rank would print it.
warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
for name in ("torch.fx._symbolic_trace", "torchrec.distributed.planner"):
    logging.getLogger(name).setLevel(logging.ERROR)


class WeightedLoss(nn.Module):
    """Turns a model's losses [samples] into the scalar that TorchRec's pipeline differentiates."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: KeyedBatch) -> tuple[Tensor, Tensor]:
        losses = self.model(batch)
        return losses.sum() * batch.weight, losses.detach()


def torchrec_trainer(
    spec: ModelSpec,
    sparse_optimizer: SparseOptimizer,
    dense_optimizer: DenseOptimizer,
    seed: int,
    name: str = "torchrec",
    planner: bool = False,
    bf16: bool = False,
    dedup: bool = False,
) -> TorchRecTrainer:
    """TorchRec with tables sharded over all ranks, see ``one_dimensional``. Collective."""
    distribute = partial(one_dimensional, planner=planner, bf16=bf16, dedup=dedup)
    return TorchRecTrainer(spec, sparse_optimizer, dense_optimizer, seed, name=name, distribute=distribute)


class TorchRecTrainer:
    """A Trainer (see ``nestpipe.trainer``) that is TorchRec.

    ``group``: the ranks, on gloo; None for all. ``distribute``: how tables are sharded and what travels.
    ``sync_interval``: batches from one synchronisation of replicas to the next, if there are any.
    ``observe``: hooks for spans and traffic; without them there are no spans and the byte counts of ``StepResult``
    are 0. Collective. Raises ValueError for a sparse optimizer that fbgemm lacks on a CPU, or for tables of unequal
    dims (a torchrec EmbeddingCollection has one dim).

    Two batches are in flight between steps (t+1 with its keys routed, t+2 read). ``state_dict`` leaves
    them out: it is the state after ``state["batches"]`` trained batches, and after ``load_state_dict`` the
    iterator must start with the batch of that number.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sparse_optimizer: SparseOptimizer,
        dense_optimizer: DenseOptimizer,
        seed: int,
        group: dist.ProcessGroup | None = None,
        name: str = "torchrec",
        observe: bool = True,
        distribute: Distribute = one_dimensional,
        sync_interval: int = 1,
    ) -> None:
        if sparse_optimizer.name not in FUSED:
            raise ValueError(f"sparse optimizer '{sparse_optimizer.name}': fbgemm on a CPU has {', '.join(FUSED)}")
        if len({table.dim for table in spec.tables}) != 1:
            raise ValueError("the tables of an EmbeddingCollection must have one dim: " + str(spec.tables))
        self.name = name
        self.tables = {table.name: table for table in spec.tables}
        everyone = group or dist.group.WORLD
        assert everyone is not None, "join a process group first"
        self._group: dist.ProcessGroup = everyone
        self._world = dist.get_world_size(self._group)
        # Agreement at the end of the data is not part of TorchRec's step, so it has its own group, made now because
        # all ranks are here. (The name of a group that only some ranks make depends only on those ranks, so a second
        # trainer would find the first one's dead addresses in the store.)
        self._control = dist.new_group(backend="gloo") if group is None else self._group
        self._features = [feature for table in spec.tables for feature in table.features]
        self._trained = 0
        self._batches: AlignedBatches | None = None
        self._current: KeyedBatch | None = None

        self._module = spec.build(collection_of(spec.tables))
        distributed = distribute(WeightedLoss(self._module), sparse_optimizer, self._group)
        self._dmp, self._sharding_group = distributed.dmp, distributed.sharding_group
        self._collection = next(m for m in self._module.modules() if isinstance(m, ShardedEmbeddingCollection))
        load_initial_rows(self._collection, self.tables, seed)
        optimizer = self._optimizer(dense_optimizer)
        self._pipeline = TrainPipelineSparseDist(
            self._dmp, optimizer, torch.device("cpu"), dmp_collection_sync_interval_batches=sync_interval
        )

        root = get_unwrapped_module(self._dmp)
        root.register_forward_pre_hook(self._forward_begins)
        self._collection.register_forward_hook(self._hide_padding_sample)
        self._observer = Observer(self._sharding_group) if observe else None
        counted = observe and is_row_wise(self._collection)
        self._traffic = Traffic(self._collection, self.tables, self._sharding_group) if counted else None
        # Weights and optimizer state of all rows, averaged over the groups by a ring AllReduce.
        groups = self._world // dist.get_world_size(self._sharding_group)
        held = sum(x.nbytes for shard in shards(self._collection) for x in (shard.weight, *shard.state))
        self._replica_bytes, self._sync_interval = 2 * (groups - 1) * held // groups, sync_interval
        self._clock = self._observer or NoClock()
        if self._observer:
            self._observer.attach(self._collection, self._pipeline, self._dmp)
            root.register_forward_hook(lambda *_: self._observer.loss_computed())

    def _optimizer(self, dense_optimizer: DenseOptimizer) -> CombinedOptimizer:
        def build(parameters: list[nn.Parameter]) -> Any:
            self._dense_optimizer = dense_optimizer(parameters)
            return self._dense_optimizer

        dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(self._dmp.named_parameters())), build)
        return CombinedOptimizer([self._dmp.fused_optimizer, dense])

    # ---- hooks that are set with and without observation ----

    def _forward_begins(self, module: nn.Module, inputs: tuple[KeyedBatch]) -> None:
        self._current = inputs[0]

    def _hide_padding_sample(self, module: nn.Module, inputs: Any, awaitable: Any) -> None:
        if self._current is not None and not len(self._current):
            awaitable.callbacks.append(_without_samples)

    # ---- the Trainer interface ----

    @property
    def trained(self) -> int:
        return self._trained

    def progress(self, batches: Iterator[Batch]) -> StepResult:
        if self._batches is None or self._batches.source is not batches:
            count = self._batches.count if self._batches else self._trained
            self._batches = AlignedBatches(batches, self._features, self._control, self._world, count, self._clock)
        with self._observer.step() if self._observer else nullcontext():
            losses = self._pipeline.progress(self._batches)
        batch, step = self._current, self._trained
        assert batch is not None
        self._trained += 1
        loss = float(losses.sum()) / max(1, batch.global_samples)
        sent = self._observer.sent_bytes if self._observer else 0
        minimum, duplication = self._traffic.of(batch) if self._traffic else (0, 1.0)
        synchronised = self._replica_bytes if self._observer and step % self._sync_interval == 0 else 0
        return StepResult(step, loss, len(batch), sent, minimum, duplication, synchronised)

    def take_spans(self) -> list[Span]:
        if self._observer is None:
            return []
        spans, self._observer.spans = self._observer.spans, []
        return spans

    def table(self, name: str) -> Tensor:
        table = self.tables[name]
        whole = torch.zeros(table.rows, table.dim)
        for shard in shards(self._collection):
            if shard.table == name:
                whole[shard.first : shard.first + len(shard.weight)] = shard.weight
        dist.all_reduce(whole, group=self._sharding_group)
        return whole

    def dense_state(self) -> dict[str, Tensor]:
        named = self._module.named_parameters()
        return {name: p.detach() for name, p in named if not name.startswith("embeddings.")}

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards, first row and state by table, the dense part and the number of trained batches."""
        return {
            "batches": self._trained,
            "world": self._world,
            "tables": {
                s.table: {"first": s.first, "weight": s.weight.clone(), "state": [x.clone() for x in s.state]}
                for s in shards(self._collection)
            },
            "dense": {name: value.clone() for name, value in self.dense_state().items()},
            "dense_optimizer": deepcopy(self._dense_optimizer.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drops the batches in flight. Raises ValueError for a state of another number of ranks."""
        if state["world"] != self._world:
            raise ValueError(
                f"state of {state['world']} ranks: TorchRec's shards only fit that number, not {self._world}"
            )
        self._drop_in_flight()
        with torch.no_grad():
            for shard in shards(self._collection):
                saved = state["tables"][shard.table]
                pairs = zip([shard.weight, *shard.state], [saved["weight"], *saved["state"]], strict=True)
                for mine, theirs in pairs:
                    mine.copy_(theirs)
            for name, value in self.dense_state().items():
                value.copy_(state["dense"][name])
        self._dense_optimizer.load_state_dict(deepcopy(state["dense_optimizer"]))
        self._trained = state["batches"]
        # TorchRec counts batches by their contexts, and synchronises replicas by that count.
        self._pipeline._next_index = self._trained
        self._batches = None

    def close(self) -> None:
        if error_on_its_way():
            return
        self._drop_in_flight()
        self._pipeline.detach()
        dist.barrier(group=self._control)
        if self._control is not self._group:
            dist.destroy_process_group(self._control)

    def _drop_in_flight(self) -> None:
        for context in self._pipeline.contexts:
            for request in context.input_dist_tensors_requests.values():
                request.wait()
        self._pipeline.reset()


def _without_samples(features: Mapping[str, Any]) -> dict[str, Any]:
    """The embedded features of a batch without samples, with the padding sample removed from their lengths."""
    return {
        name: type(jagged)(values=jagged.values(), lengths=jagged.lengths()[:0]) for name, jagged in features.items()
    }
