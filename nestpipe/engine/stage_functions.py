"""What each stage of a schedule does on this engine, and the memory that it works in.

All state that stages hand to one another lies in rings whose sizes the schedule declares, so that
what the checker proves about the declared slots holds for the memory that is really used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.embedding.dual_buffer import DualBuffer
from nestpipe.embedding.host_table import host_table, shard_layout
from nestpipe.embedding.key_routing import RoutingPlan, route
from nestpipe.embedding.received import ReceivedEmbeddings
from nestpipe.embedding.replica_groups import Replicas, sharding_groups
from nestpipe.embedding.sparse_optimizers import averaged_update, momentum_scaled, sparse_update, state_width
from nestpipe.ranks.collectives import Exchange
from nestpipe.schedule.operations import Ref, Schedule
from nestpipe.trainer import DenseOptimizer, ModelSpec, SparseOptimizer, StepResult

_ENDED = RoutingPlan(ended=True)


class Stages:
    """``execute`` runs one operation; the caller sees to the order. The process groups are one per lane.

    ``source``: where P reads; ``results``: by batch, what O leaves; ``early_rows``: by batch, rows that R puts into
    the buffer in place of the table's (a resumed run had read them early).
    """

    def __init__(
        self,
        schedule: Schedule,
        spec: ModelSpec,
        sparse_optimizer: SparseOptimizer,
        dense_optimizer: DenseOptimizer,
        seed: int,
        replica_groups: int,
    ):
        self.schedule = schedule
        self.spec = spec
        marks = {op.ref.stage: op.marks for op in schedule.ops}
        self._averaged = "update_rule" in marks["U"]
        self._rule = momentum_scaled(sparse_optimizer, replica_groups) if self._averaged else sparse_optimizer
        self._wire = {stage: torch.bfloat16 if "lossy" in marks[stage] else torch.float32 for stage in "EG"}
        sharding = sharding_groups(replica_groups if "D" in marks else 1)
        self.exchanges = {group: Exchange(sharding) for group in ("keys", "all2all")} | {"allreduce": Exchange()}
        self._replicas = Replicas(replica_groups) if sharding else None
        if self._replicas:
            self.exchanges |= self._replicas.exchanges
        ranks = self.exchanges["keys"]
        self.layout = shard_layout(spec.tables, ranks.world_size)
        width = state_width(sparse_optimizer, spec.tables[0].dim)
        self.shard = host_table(self.layout, ranks.rank, seed, width)
        self._dim = spec.tables[0].dim
        self.buffers = DualBuffer(schedule.rings["buffer"], self._dim, width)
        self._embeddings = ReceivedEmbeddings(spec.tables)
        self.model = spec.build(self._embeddings)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.flat_gradient = _flat_gradients(self._parameters)
        self.dense_optimizer = dense_optimizer(self._parameters)
        self._rings: dict[str, list[Any]] = {name: [None] * size for name, size in schedule.rings.items()}
        self._losses: dict[tuple[int, int], float] = {}
        self.results: dict[int, StepResult] = {}
        self.source: Iterator[Batch] = iter(())
        self._exhausted = False
        self.first = 0
        self._has_sync = any(op.ref.stage == "S" for op in schedule.ops)
        self._run_stage: dict[str, Callable[[Ref], None]] = {
            op.ref.stage: getattr(self, _METHODS[op.ref.stage]) for op in schedule.ops
        }
        self._updates_table = any(op.ref.stage == "U" and "table" in op.writes for op in schedule.ops)
        self.early_rows: Mapping[int, Mapping[str, Tensor]] = {}

    def begin_at(self, step: int) -> None:
        """A pipeline starts with batch ``step``: what earlier batches left in the rings is void."""
        self.first, self._exhausted = step, False
        for ring in self._rings.values():
            ring[:] = [None] * len(ring)

    def execute(self, op: Ref) -> None:
        """Run one operation now. Batches before the first and after the last are passed over."""
        if op.batch < self.first or (op.stage not in "PHK" and self.plan(op.batch).ended):
            return
        self._run_stage[op.stage](op)

    def _get(self, name: str, op: Ref, before: int = 0) -> Any:
        return self._rings[name][(op.batch - before) % len(self._rings[name])]

    def _put(self, name: str, op: Ref, value: Any) -> None:
        self._rings[name][op.batch % len(self._rings[name])] = value

    def _micro(self, name: str, op: Ref) -> int:
        return (op.batch * self.schedule.micro_batches + op.micro - 1) % len(self._rings[name])

    def plan(self, batch: int) -> RoutingPlan:
        return self._rings["plan"][batch % len(self._rings["plan"])] or _ENDED

    def _buffer(self, op: Ref, before: int = 0) -> int:
        return (op.batch - before) % self.schedule.rings["buffer"]

    # ---- the stages ----

    def _prefetch(self, op: Ref) -> None:
        batch = None if self._exhausted else next(self.source, None)
        self._exhausted = batch is None
        parts = self._nothing() if batch is None else batch.split(self.schedule.micro_batches)
        self._put("input", op, (parts, batch is None))

    def _nothing(self) -> Sequence[Batch]:
        none = torch.empty(0, dtype=torch.int64)
        features = (feature for table in self.spec.tables for feature in table.features)
        empty = Batch({feature: Jagged(none, none) for feature in features}, none, {}, share=0.0)
        return [empty] * self.schedule.micro_batches

    def _copy_to_device(self, op: Ref) -> None:
        parts, _ = self._get("input", op)
        self._put("batch", op, parts)  # the host is the device here

    def _route_keys(self, op: Ref) -> None:
        parts, ended = self._get("input", op)
        before = self._get("plan", op, 1) if self._has_sync and op.batch > self.first else None
        if self._replicas is None:
            plan = route(parts, ended, self.layout, self.exchanges["keys"], before)
        else:
            plan = route(parts, ended, self.layout, self.exchanges["keys"], None, self._replicas.agree)
            plan = plan if plan.ended else self._replicas.widened(plan, before)
        self._put("plan", op, plan)

    def _retrieve(self, op: Ref) -> None:
        rows = self.plan(op.batch).rows
        buffer = self.buffers.resize(self._buffer(op), len(rows))
        early = self.early_rows.get(op.batch)
        if early is None:
            self.shard.gather(rows, buffer)
        else:  # resumed: these rows were in the buffer when the checkpoint was taken
            buffer.weight.copy_(early["weight"])
            buffer.state.copy_(early["state"])

    def _synchronise(self, op: Ref) -> None:
        if op.batch > self.first:
            plan = self.plan(op.batch)
            self.buffers.synchronise(self._buffer(op), self._buffer(op, 1), plan.shared, plan.shared_before)

    def _embedding_all_to_all(self, op: Ref) -> None:
        plan = self.plan(op.batch).micro[op.micro - 1]
        source = self.buffers[self._buffer(op)].weight.index_select(0, plan.send_index)
        self._rings["received"][self._micro("received", op)] = self._exchange_rows("E", source, plan.receive, plan.send)

    def _exchange_rows(self, stage: str, source: Tensor, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        source = source.to(self._wire[stage])  # rows that stay here too: results do not depend on the ranks
        if self.layout.world_size > 1:
            target = torch.empty(sum(receive), self._dim, dtype=source.dtype)
            self.exchanges["all2all"].all_to_all(target, source, receive, send)
            source = target
        return source.float()

    def _forward(self, op: Ref) -> None:
        part = self._get("batch", op)[op.micro - 1]
        slot = self._micro("activation", op)
        if not len(part):
            self._rings["activation"][slot] = None
            return
        plan = self.plan(op.batch)
        received = self._rings["received"][self._micro("received", op)].requires_grad_()
        self._embeddings.set(received, plan.micro[op.micro - 1].inverse, part)
        losses = self.model(part)
        if losses.shape != (() if self.spec.summed else (len(part),)):
            raise ValueError(
                f"the model returned losses of shape {tuple(losses.shape)} for {len(part)} samples: return one per "
                f"sample, shape ({len(part)},), not their mean (reduction='none')"
            )
        loss = losses.sum() / plan.global_samples
        self._losses[op.batch, op.micro] = float(loss.detach())
        self._rings["activation"][slot] = loss

    def _backward(self, op: Ref) -> None:
        loss = self._rings["activation"][self._micro("activation", op)]
        received = self._rings["received"][self._micro("received", op)]
        if loss is not None:
            loss.backward()
        gradient = torch.zeros_like(received) if received.grad is None else received.grad
        self._rings["gradient"][self._micro("gradient", op)] = gradient
        self._rings["activation"][self._micro("activation", op)] = None

    def _gradient_all_to_all(self, op: Ref) -> None:
        plan = self.plan(op.batch).micro[op.micro - 1]
        gradient = self._rings["gradient"][self._micro("gradient", op)]
        arrived = self._exchange_rows("G", gradient, plan.send, plan.receive)
        if plan.everywhere is None or plan.arrive_index is None:
            self._accumulate(op, plan.send_index, arrived)
        else:
            own = torch.zeros(len(plan.everywhere), self._dim).index_add_(0, plan.arrive_index, arrived)
            self._rings["arrived"][self._micro("arrived", op)] = own

    def _synchronise_replicas(self, op: Ref) -> None:
        own = self._rings["arrived"][self._micro("arrived", op)]
        if self._replicas is None:  # one group: G has accumulated
            return
        index = self.plan(op.batch).micro[op.micro - 1].everywhere
        assert index is not None
        self._accumulate(op, index, self._replicas.apart(own) if self._averaged else self._replicas.summed(own))

    def _accumulate(self, op: Ref, index: Tensor, gradient: Tensor) -> None:
        """Add float32 [.., n, dim] to the accumulator's rows ``index``; with 2D-SP's rule it has a part per group."""
        total = self._get("accumulator", op)
        if total is None:
            total = torch.zeros(*gradient.shape[:-2], len(self.plan(op.batch).rows), self._dim)
        self._put("accumulator", op, total.index_add_(-2, index, gradient))

    def _all_reduce(self, op: Ref) -> None:
        self.exchanges["allreduce"].all_reduce(self.flat_gradient)

    def _sparse_update(self, op: Ref) -> None:
        total, rows = self._get("accumulator", op), self.buffers[self._buffer(op)]
        index = self.plan(op.batch).rows
        if self._updates_table:  # what the buffer holds was read early: the update goes to what is there now
            self.shard.gather(index, rows)
        if self._averaged and total.dim() == 3:
            averaged_update(self._rule, rows, total)
        else:
            sparse_update(self._rule, rows, total)
        if self._updates_table:
            self.shard.scatter(index, rows)
        self._put("accumulator", op, None)

    def _dense_step(self, op: Ref) -> None:
        self.dense_optimizer.step()
        self.flat_gradient.zero_()
        plan = self.plan(op.batch)
        row = sum(dtype.itemsize for dtype in self._wire.values()) * self._dim  # there and back
        sent = sum(self._replicas.sent_rows(n, self._averaged) for n in plan.synchronised) if self._replicas else 0
        self.results[op.batch] = StepResult(
            step=op.batch,
            loss=sum(self._losses.pop((op.batch, m), 0.0) for m in range(1, self.schedule.micro_batches + 1)),
            samples=sum(map(len, self._get("batch", op))),
            embedding_bytes=plan.remote * row,
            minimum_embedding_bytes=plan.minimum_remote * row,
            duplication_factor=plan.travelling / max(1, plan.distinct),
            replica_bytes=sent * self._dim * 4,
        )

    def _write_back(self, op: Ref) -> None:
        self.shard.scatter(self.plan(op.batch).rows, self.buffers[self._buffer(op)])


_METHODS = {
    "P": "_prefetch",
    "H": "_copy_to_device",
    "K": "_route_keys",
    "R": "_retrieve",
    "S": "_synchronise",
    "E": "_embedding_all_to_all",
    "F": "_forward",
    "B": "_backward",
    "G": "_gradient_all_to_all",
    "D": "_synchronise_replicas",
    "A": "_all_reduce",
    "U": "_sparse_update",
    "O": "_dense_step",
    "W": "_write_back",
}


def _flat_gradients(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """One vector that all dense gradients are views of: one AllReduce, and backward adds in place."""
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter)
    return flat
