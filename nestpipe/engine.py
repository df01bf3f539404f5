"""The trainer that executes a schedule: each stage is bound to a function, lanes decide when it runs.

All state that stages hand to one another lies in rings whose sizes the schedule declares, so that
what the checker proves about the declared slots holds for the memory that is really used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nestpipe.collectives import Exchange, error_on_its_way
from nestpipe.consistency import unfinished_steps
from nestpipe.data.batch import Batch, Jagged
from nestpipe.embedding.collection import ReceivedEmbeddings
from nestpipe.embedding.optim import sparse_update, state_width
from nestpipe.embedding.routing import RoutingPlan, route
from nestpipe.embedding.table import DualBuffer, host_table, shard_layout
from nestpipe.lanes import Delay, LaneStopped, OneAtATime, ThreadLanes
from nestpipe.schedule import Ref, Schedule, folded
from nestpipe.trace import Span
from nestpipe.trainer import DenseOptimizer, ModelSpec, SparseOptimizer, StepResult

_ENDED = RoutingPlan(ended=True)


class Engine:
    """Trains ``spec`` by ``schedule`` on every rank of the default process group (or on one rank without it).

    ``overlap=False`` runs the schedule's list one operation at a time. ``delay`` shakes the lanes (tests).
    Raises ValueError for a schedule that lacks a stage this engine needs or whose declared accesses
    do not cover what the stage really touches.
    """

    def __init__(
        self,
        schedule: Schedule,
        spec: ModelSpec,
        sparse_optimizer: SparseOptimizer,
        dense_optimizer: DenseOptimizer,
        seed: int,
        overlap: bool = True,
        delay: Delay | None = None,
    ):
        _require_runnable(schedule)
        self.name = schedule.name
        self.schedule = schedule
        self._spec = spec
        self._rule = sparse_optimizer
        self._exchanges = {group: Exchange() for group in ("keys", "all2all", "allreduce")}
        ranks = self._exchanges["keys"]
        self.layout = shard_layout(spec.tables, ranks.world_size)
        width = state_width(sparse_optimizer)
        self.shard = host_table(self.layout, ranks.rank, seed, width)
        self._dim = spec.tables[0].dim
        self.buffers = DualBuffer(schedule.rings["buffer"], self._dim, width)
        self._embeddings = ReceivedEmbeddings(spec.tables)
        self.model = spec.build(self._embeddings)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._flat_gradient = _flat_gradients(self._parameters)
        self.dense_optimizer = dense_optimizer(self._parameters)
        self._rings: dict[str, list[Any]] = {name: [None] * size for name, size in schedule.rings.items()}
        self._losses: dict[tuple[int, int], float] = {}
        self._results: dict[int, StepResult] = {}
        self._source: Iterator[Batch] = iter(())
        self._exhausted = False
        self._running = False
        self._step = 0
        self._first = 0
        self._late_write_back = any(op.ref.stage == "W" and op.ref.batch < 0 for op in schedule.ops)
        self._has_sync = any(op.ref.stage == "S" for op in schedule.ops)
        self._run_stage: dict[str, Callable[[Ref], None]] = {
            op.ref.stage: getattr(self, _METHODS[op.ref.stage]) for op in schedule.ops
        }
        lanes = folded(schedule, _lanes_without_waiting(ranks.world_size))
        self._lanes: ThreadLanes | OneAtATime = (
            ThreadLanes(lanes, self.execute, delay=delay) if overlap else OneAtATime(lanes, self.execute)
        )

    # ---- the Trainer interface ----

    def progress(self, batches: Iterator[Batch]) -> StepResult:
        self._source = batches
        try:
            if not self._running:
                self.begin()
                for step in range(self._step - self.schedule.depth, self._step):
                    self._lanes.run_step(step)
            self._lanes.run_step(self._step)
            self._lanes.wait(Ref("O", self._step))
            if self._step not in self._results:  # passed over: the data of all ranks has ended
                self._lanes.drain()
                self._running = False
                raise StopIteration
        except LaneStopped as stopped:
            raise stopped.__cause__ or stopped from None
        self._step += 1
        return self._results.pop(self._step - 1)

    def take_spans(self) -> list[Span]:
        return self._lanes.take_spans()

    def table(self, name: str) -> Tensor:
        self.finish()
        t = [table.name for table in self._spec.tables].index(name)
        base, block = self.layout.base[t], self.layout.block[t]
        blocks = self._exchanges["keys"].all_gather(self.shard.weight[base : base + block])
        return blocks.flatten(0, 1)[: self._spec.tables[t].rows]

    def dense_state(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        self.finish()
        return {
            "weight": self.shard.weight,
            "state": self.shard.state,
            "dense": {name: p.detach() for name, p in self.model.named_parameters()},
            "dense_optimizer": self.dense_optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.finish()
        self.shard.weight.copy_(state["weight"])
        self.shard.state.copy_(state["state"])
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state["dense"][name])
        self.dense_optimizer.load_state_dict(state["dense_optimizer"])

    def close(self) -> None:
        self._lanes.close()
        if not error_on_its_way():
            for exchange in self._exchanges.values():
                exchange.close()

    # ---- running ----

    def begin(self) -> None:
        """Start a pipeline at the current step: what earlier batches left in the rings is void."""
        self._running, self._exhausted = True, False
        self._first = self._step
        for ring in self._rings.values():
            ring[:] = [None] * len(ring)
        self._lanes.start(self._step - self.schedule.depth)

    def execute(self, op: Ref) -> None:
        """Run one operation now. Batches before the first and after the last are passed over."""
        if op.batch < self._first or (op.stage not in "PHK" and self._plan(op.batch).ended):
            return
        self._run_stage[op.stage](op)

    def finish(self) -> None:
        """Bring the host table up to date between steps; the pipeline goes on afterwards."""
        if not self._running:
            return
        self._lanes.drain()
        # Between steps the newest update is in the buffer alone, where W belongs to the next step.
        last = self._step - 1
        if self._late_write_back and last >= self._first:
            self._write_back(Ref("W", last))

    def _get(self, name: str, op: Ref, before: int = 0) -> Any:
        return self._rings[name][(op.batch - before) % len(self._rings[name])]

    def _put(self, name: str, op: Ref, value: Any) -> None:
        self._rings[name][op.batch % len(self._rings[name])] = value

    def _micro(self, name: str, op: Ref) -> int:
        return (op.batch * self.schedule.micro_batches + op.micro - 1) % len(self._rings[name])

    def _plan(self, batch: int) -> RoutingPlan:
        return self._rings["plan"][batch % len(self._rings["plan"])] or _ENDED

    def _buffer(self, op: Ref, before: int = 0) -> int:
        return (op.batch - before) % self.schedule.rings["buffer"]

    # ---- the stages ----

    def _prefetch(self, op: Ref) -> None:
        batch = None if self._exhausted else next(self._source, None)
        self._exhausted = batch is None
        parts = self._nothing() if batch is None else batch.split(self.schedule.micro_batches)
        self._put("input", op, (parts, batch is None))

    def _nothing(self) -> Sequence[Batch]:
        none = torch.empty(0, dtype=torch.int64)
        features = (feature for table in self._spec.tables for feature in table.features)
        empty = Batch({feature: Jagged(none, none) for feature in features}, none, {}, share=0.0)
        return [empty] * self.schedule.micro_batches

    def _copy_to_device(self, op: Ref) -> None:
        parts, _ = self._get("input", op)
        self._put("batch", op, parts)  # the host is the device here

    def _route_keys(self, op: Ref) -> None:
        parts, ended = self._get("input", op)
        before = self._get("plan", op, 1) if self._has_sync and op.batch > self._first else None
        self._put("plan", op, route(parts, ended, self.layout, self._exchanges["keys"], before))

    def _retrieve(self, op: Ref) -> None:
        rows = self._plan(op.batch).rows
        self.shard.gather(rows, self.buffers.resize(self._buffer(op), len(rows)))

    def _synchronise(self, op: Ref) -> None:
        if op.batch > self._first:
            plan = self._plan(op.batch)
            self.buffers.synchronise(self._buffer(op), self._buffer(op, 1), plan.shared, plan.shared_before)

    def _embedding_all_to_all(self, op: Ref) -> None:
        plan = self._plan(op.batch).micro[op.micro - 1]
        source = self.buffers[self._buffer(op)].weight.index_select(0, plan.send_index)
        self._rings["received"][self._micro("received", op)] = self._exchange_rows(source, plan.receive, plan.send)

    def _exchange_rows(self, source: Tensor, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        if self.layout.world_size == 1:
            return source
        target = torch.empty(sum(receive), self._dim)
        self._exchanges["all2all"].all_to_all(target, source, receive, send)
        return target

    def _forward(self, op: Ref) -> None:
        part = self._get("batch", op)[op.micro - 1]
        slot = self._micro("activation", op)
        if not len(part):
            self._rings["activation"][slot] = None
            return
        plan = self._plan(op.batch)
        received = self._rings["received"][self._micro("received", op)].requires_grad_()
        self._embeddings.set(received, plan.micro[op.micro - 1].inverse, part)
        loss = self.model(part).sum() / plan.global_samples
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
        plan = self._plan(op.batch).micro[op.micro - 1]
        gradient = self._rings["gradient"][self._micro("gradient", op)]
        arrived = self._exchange_rows(gradient, plan.send, plan.receive)
        total = self._get("accumulator", op)
        if total is None:
            total = torch.zeros(len(self._plan(op.batch).rows), self._dim)
        self._put("accumulator", op, total.index_add_(0, plan.send_index, arrived))

    def _all_reduce(self, op: Ref) -> None:
        self._exchanges["allreduce"].all_reduce(self._flat_gradient)

    def _sparse_update(self, op: Ref) -> None:
        total = self._get("accumulator", op)
        sparse_update(self._rule, self.buffers[self._buffer(op)], total)
        self._put("accumulator", op, None)

    def _dense_step(self, op: Ref) -> None:
        self.dense_optimizer.step()
        self._flat_gradient.zero_()
        plan = self._plan(op.batch)
        self._results[op.batch] = StepResult(
            step=op.batch,
            loss=sum(self._losses.pop((op.batch, m), 0.0) for m in range(1, self.schedule.micro_batches + 1)),
            samples=sum(map(len, self._get("batch", op))),
            embedding_bytes=2 * plan.remote * self._dim * 4,
            minimum_embedding_bytes=2 * plan.minimum_remote * self._dim * 4,
            duplication_factor=plan.travelling / max(1, plan.distinct),
        )

    def _write_back(self, op: Ref) -> None:
        self.shard.scatter(self._plan(op.batch).rows, self.buffers[self._buffer(op)])


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
    "A": "_all_reduce",
    "U": "_sparse_update",
    "O": "_dense_step",
    "W": "_write_back",
}


def _lanes_without_waiting(world_size: int) -> dict[str, str]:
    """Lanes that would only add hand-offs between threads: no copy on a CPU, no collective on one rank."""
    alone = {"all2all": "compute", "allreduce": "compute"} if world_size == 1 else {}
    return {"copy": "keys", **alone}


def _flat_gradients(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """One vector that all dense gradients are views of: one AllReduce, and backward adds in place."""
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter)
    return flat


def _require_runnable(schedule: Schedule) -> None:
    needed = [(s, m) for s in "EFBG" for m in range(1, schedule.micro_batches + 1)] + [(s, 0) for s in "PHKRAUOW"]
    present = {(op.ref.stage, op.ref.micro) for op in schedule.ops}
    for stage, micro in needed:
        if (stage, micro) not in present:
            name = stage + (f".{micro}" if micro else "")
            raise ValueError(f"schedule '{schedule.name}' lacks {name}: this engine cannot train without it")
    if texts := unfinished_steps(schedule):
        raise ValueError(f"schedule '{schedule.name}': {texts[0]}")
    for op in schedule.ops:
        touched = {*op.stage.reads, *op.stage.writes} - {"plan-1"}
        hidden = sorted(touched - {*op.reads, *op.writes}) or sorted({*op.stage.writes} - {*op.writes})
        if hidden:
            name = f"schedule '{schedule.name}': {op.ref.relative()}"
            raise ValueError(f"{name} touches {', '.join(hidden)}, which it does not declare")
