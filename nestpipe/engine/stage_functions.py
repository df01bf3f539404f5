"""What each stage of a schedule does on this engine.

Everything that stages hand to one another is in rings, whose slots the schedule declares. So what the checker
proves about the declared slots holds for the memory that the engine uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.embedding.dual_buffer import RowBuffer, synchronise
from nestpipe.embedding.host_table import HostTable
from nestpipe.embedding.key_routing import RoutingPlan, route
from nestpipe.embedding.memory import HOST, Memory
from nestpipe.embedding.sparse_optimizers import averaged_update, momentum_scaled, sparse_update
from nestpipe.engine.dense_part import BatchTotals, DensePart
from nestpipe.engine.exchanges import Exchanges
from nestpipe.engine.random_turns import RandomTurns
from nestpipe.engine.rings import Rings
from nestpipe.engine.source import Source
from nestpipe.schedule.operations import Ref, Schedule
from nestpipe.schedule.stages import of_stage
from nestpipe.trainer import DivideBy, SparseOptimizer, StepResult

_ENDED = RoutingPlan(ended=True)


class StageFunctions:
    """``execute`` runs one operation. The caller is responsible for the order.

    ``source``: what P reads from. ``functions``: the function of each stage, by letter. ``finished``: the last batch
    that O has trained. Raises ValueError for a stage of ``schedule`` that has no function.
    """

    def __init__(
        self,
        schedule: Schedule,
        sparse_optimizer: SparseOptimizer,
        table: HostTable,
        dense: DensePart,
        divide_by: DivideBy,
        exchanges: Exchanges,
        source: Source,
        memory: Memory,
    ):
        self.functions: dict[str, Callable[[Ref], None]] = {
            "P": self._prefetch,
            "H": self._copy_to_device,
            "K": self._route_keys,
            "R": self._retrieve,
            "S": self._synchronise,
            "E": self._embedding_all_to_all,
            "F": self._forward,
            "B": self._backward,
            "G": self._gradient_all_to_all,
            "D": self._synchronise_replicas,
            "A": self._all_reduce,
            "U": self._sparse_update,
            "O": self._dense_step,
            "W": self._write_back,
        }
        marks = {op.ref.stage: op.marks for op in schedule.ops}
        for letter in marks:
            of_stage(self.functions, letter, "a function of the engine", "nestpipe/engine/stage_functions.py")
        self._schedule = schedule
        self._micro_batches = schedule.micro_batches
        self._table = table
        self._dense = dense
        self._divide_by = divide_by
        self._exchanges = exchanges
        self._source = source
        self.turns = RandomTurns()
        self._memory = memory
        self._averaged = "update_rule" in marks["U"]
        self._rule = momentum_scaled(sparse_optimizer, exchanges.copies) if self._averaged else sparse_optimizer
        self._wire = {stage: torch.bfloat16 if "lossy" in marks[stage] else torch.float32 for stage in "EG"}
        self._synchronises = "S" in marks
        self._dim = table.layout.tables[0].dim
        state_width = table.rows.state.shape[1]
        self._rings = Rings(schedule, lambda: RowBuffer(self._dim, state_width, memory))
        self._current = RowBuffer(self._dim, state_width, memory)  # used only if U updates the table
        self._losses: dict[int, float] = {}  # by batch: this rank's share so far
        self._totals: dict[int, BatchTotals] = {}
        self._results: dict[int, StepResult] = {}
        self.finished = -1
        self._first = 0
        self._early_rows: Mapping[int, Mapping[str, Tensor]] = {}

    def begin_at(self, step: int, early_rows: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Start a pipeline with batch ``step``, and drop what earlier batches left in the rings.

        ``early_rows``: by batch, rows restored from a checkpoint (``rows_read_early``), used instead of the table's.
        """
        self._first = step
        self._early_rows = early_rows
        self._rings.clear()

    def execute(self, ref: Ref) -> None:
        """Run one operation now. Operations of batches before the first and after the last are skipped."""
        if ref.batch < self._first or (ref.stage not in "PHK" and self._plan(ref).ended):
            return
        self.functions[ref.stage](ref)

    def take_result(self, step: int) -> StepResult | None:
        """The result that O left for ``step``, only once; None if the data of all ranks had ended."""
        return self._results.pop(step, None)

    def rows_read_early(self, batch: int) -> dict[str, Tensor] | None:
        """Copies of a batch's rows in its buffer if any of them no longer matches the table, None if all match."""
        ref = Ref("R", batch)
        plan, rows = self._plan(ref), self._rings["buffer", ref].rows
        if plan.ended or rows.equals(self._table.rows, plan.rows):
            return None
        return {"rows": plan.rows, "weight": rows.weight.clone(), "state": rows.state.clone()}

    def _plan(self, ref: Ref) -> RoutingPlan:
        return self._rings["plan", ref] or _ENDED

    # ---- the stages ----

    def _prefetch(self, ref: Ref) -> None:
        with self.turns.reading(self._source.new_iterator(ref.batch), is_empty=ref.batch == self._first):
            batch, taken = self._source.read(ref.batch)
        parts = self._empty_parts() if batch is None else batch.split(self._micro_batches)
        self._rings["input", ref] = (parts, batch is None, taken)

    def _empty_parts(self) -> Sequence[Batch]:
        empty = Batch({}, HOST.empty(0, dtype=torch.int64), {}, share=0.0, reads={})
        return [empty] * self._micro_batches

    def _copy_to_device(self, ref: Ref) -> None:
        parts, _, _ = self._rings["input", ref]
        self._rings["batch", ref] = parts  # the host is the device here

    def _route_keys(self, ref: Ref) -> None:
        parts, ended, taken = self._rings["input", ref]
        layout, exchange, replicas = self._table.layout, self._exchanges.keys, self._exchanges.replicas
        previous = self._rings["plan-1", ref] if self._synchronises and ref.batch > self._first else None
        if replicas is None:
            plan = route(parts, ended, layout, exchange, previous, taken=taken)
        else:
            plan = route(parts, ended, layout, exchange, None, replicas.agree, taken)
            plan = plan if plan.ended else replicas.widened(plan, previous)
        self._rings["plan", ref] = plan

    def _retrieve(self, ref: Ref) -> None:
        index = self._plan(ref).rows
        rows = self._rings["buffer", ref].resize(len(index))
        early = self._early_rows.get(ref.batch)
        if early is None:
            self._table.rows.gather(index, rows)
        else:  # a resumed run: these rows were in the buffer when the checkpoint was taken
            rows.weight.copy_(early["weight"])
            rows.state.copy_(early["state"])

    def _synchronise(self, ref: Ref) -> None:
        if ref.batch > self._first:
            plan = self._plan(ref)
            new, old = self._rings["buffer", ref].rows, self._rings["buffer-1", ref].rows
            synchronise(new, old, plan.shared, plan.shared_before)

    def _embedding_all_to_all(self, ref: Ref) -> None:
        plan = self._plan(ref).micro[ref.micro - 1]
        source = self._rings["buffer", ref].rows.weight.index_select(0, plan.send_index)
        self._rings["received", ref] = self._exchange_rows("E", source, plan.receive, plan.send)

    def _exchange_rows(self, stage: str, source: Tensor, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        source = source.to(self._wire[stage])  # also rows that stay here, so results do not depend on the rank count
        if self._table.layout.world_size > 1:
            target = self._memory.empty(sum(receive), self._dim, dtype=source.dtype)
            self._exchanges.all2all.all_to_all(target, source, receive, send)
            source = target
        return source.float()

    def _forward(self, ref: Ref) -> None:
        part = self._rings["batch", ref][ref.micro - 1]
        if not len(part):
            self._rings["activation", ref] = None
            return
        plan = self._plan(ref)
        received = self._rings["received", ref].requires_grad_()
        with self.turns.computing(is_forward=True):
            total, count = self._dense.losses(part, received, plan.micro[ref.micro - 1].inverse)
        loss = total / self._divisor(ref, plan)
        self._rings["activation", ref] = loss, float(loss.detach()), 0.0 if count is None else float(count)

    def _divisor(self, ref: Ref, plan: RoutingPlan) -> float:
        """A loss that is divided by a count is divided by the samples first, and corrected when A knows the count."""
        ranks = self._exchanges.allreduce.world_size
        if self._divide_by == "ranks":
            return ranks
        if self._divide_by == "rank_samples":
            return sum(map(len, self._rings["batch", ref])) * ranks
        return plan.global_samples

    def _correction(self, ref: Ref) -> float:
        """What the gradients of a batch are multiplied by before they are applied."""
        if self._divide_by != "count":
            return 1.0
        count = self._rings["loss_count", ref]
        return self._plan(ref).global_samples / count if count else 0.0

    def _backward(self, ref: Ref) -> None:
        activation = self._rings["activation", ref]
        received = self._rings["received", ref]
        if activation is not None:
            loss, value, count = activation
            self._dense.begin()
            if loss.requires_grad:  # not the constant that a model may return for a part without labels
                with self.turns.computing(is_forward=False):
                    loss.backward()
            self._dense.add(value, count)
            self._losses[ref.batch] = self._losses.get(ref.batch, 0.0) + value
        gradient = self._memory.zeros(*received.shape) if received.grad is None else received.grad
        self._rings["gradient", ref] = gradient
        self._rings["activation", ref] = None

    def _gradient_all_to_all(self, ref: Ref) -> None:
        plan = self._plan(ref).micro[ref.micro - 1]
        arrived = self._exchange_rows("G", self._rings["gradient", ref], plan.send, plan.receive)
        if plan.everywhere is None or plan.arrive_index is None:
            self._accumulate(ref, plan.send_index, arrived)
        else:
            own = self._memory.zeros(len(plan.everywhere), self._dim)
            self._rings["arrived", ref] = own.index_add_(0, plan.arrive_index, arrived)

    def _synchronise_replicas(self, ref: Ref) -> None:
        replicas = self._exchanges.replicas
        if replicas is None:  # one group: G has already accumulated
            return
        own = self._rings["arrived", ref]
        index = self._plan(ref).micro[ref.micro - 1].everywhere
        assert index is not None
        self._accumulate(ref, index, replicas.apart(own) if self._averaged else replicas.summed(own))

    def _accumulate(self, ref: Ref, index: Tensor, gradient: Tensor) -> None:
        """Add ``gradient``, float32 [.., n, dim], to the accumulator's rows ``index``.

        With the rule of 2D-SP both have a first dimension, with an entry for each group.
        """
        total = self._rings["accumulator", ref]
        if total is None:
            total = self._memory.zeros(*gradient.shape[:-2], len(self._plan(ref).rows), self._dim)
        self._rings["accumulator", ref] = total.index_add_(-2, index, gradient)

    def _all_reduce(self, ref: Ref) -> None:
        totals = self._dense.reduce()
        self._totals[ref.batch] = totals
        if self._divide_by == "count":
            self._rings["loss_count", ref] = totals.total_count

    def _sparse_update(self, ref: Ref) -> None:
        total, index = self._rings["accumulator", ref], self._plan(ref).rows
        if self._schedule.updates_table:  # the buffer's rows were read early, so update the table's current ones
            rows = self._current.resize(len(index))
            self._table.rows.gather(index, rows)
        else:
            rows = self._rings["buffer", ref].rows
        correction = self._correction(ref)
        if correction != 1.0:
            total.mul_(correction)
        frozen = self._table.frozen_among(index)
        kept = None if frozen is None else rows.taken(frozen)
        if self._averaged and total.dim() == 3:
            averaged_update(self._rule, rows, total)
        else:
            sparse_update(self._rule, rows, total)
        if frozen is not None and kept is not None:  # no rule promises to keep rows whose gradient is zero
            rows.scatter(frozen, kept)
        if self._schedule.updates_table:
            self._table.rows.scatter(index, rows)
        self._rings["accumulator", ref] = None

    def _dense_step(self, ref: Ref) -> None:
        correction = self._correction(ref)
        self._dense.step(correction)
        totals = self._totals.pop(ref.batch)
        plan, replicas = self._plan(ref), self._exchanges.replicas
        row = sum(dtype.itemsize for dtype in self._wire.values()) * self._dim  # there and back
        sent = sum(replicas.sent_rows(n, self._averaged) for n in plan.synchronised) if replicas else 0
        self._results[ref.batch] = StepResult(
            step=ref.batch,
            loss=self._losses.pop(ref.batch, 0.0) * correction,
            global_loss=totals.loss * correction,
            samples=sum(map(len, self._rings["batch", ref])),
            embedding_bytes=plan.remote * row,
            minimum_embedding_bytes=plan.minimum_remote * row,
            duplication_factor=plan.travelling / max(1, plan.distinct),
            replica_bytes=sent * self._dim * 4,
        )
        self.finished = ref.batch

    def _write_back(self, ref: Ref) -> None:
        self._table.rows.scatter(self._plan(ref).rows, self._rings["buffer", ref].rows)
