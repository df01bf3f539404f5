"""The trainer that executes a schedule: stages are functions, and lanes decide when each runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from nestpipe.checker.requirements import lanes_without_waiting, require_runnable
from nestpipe.data.batch import Batch
from nestpipe.embedding.host_table import host_table, resharded_rows, shard_layout
from nestpipe.embedding.memory import HOST, Memory
from nestpipe.embedding.retrieval_write_back import Rows
from nestpipe.embedding.sparse_optimizers import state_width
from nestpipe.engine.dense_part import DensePart
from nestpipe.engine.exchanges import open_exchanges
from nestpipe.engine.lanes import LaneStopped, MakeLanes, OneAtATime
from nestpipe.engine.random_turns import WATCHED_READS
from nestpipe.engine.source import Source
from nestpipe.engine.stage_functions import StageFunctions
from nestpipe.engine.thread_lanes import ThreadLanes
from nestpipe.measurement.trace import Span
from nestpipe.ranks.collectives import error_on_its_way
from nestpipe.schedule.building import counted, folded
from nestpipe.schedule.operations import Ref, Schedule
from nestpipe.trainer import DenseOptimizer, ModelSpec, SparseOptimizer, StepResult

#: How long ``close`` waits for what the lanes were given: a user's iterator may never return.
_DRAIN_SECONDS = 30.0


def make_lanes(overlap: bool) -> MakeLanes:
    """What makes the lanes: overlapping ones, a thread each, or a single sequence of operations."""
    return ThreadLanes if overlap else OneAtATime


class Engine:
    """Trains ``spec`` by ``schedule`` on every rank of the default process group, or on one rank without a group.

    ``lanes``: makes what runs the operations; ``OneAtATime`` runs the schedule's list one by one.
    ``replica_groups``: the number of groups that each hold a whole copy of the tables, if the schedule has a stage D.
    ``memory``: allocates rings, buffers and gradients.

    Marks are obeyed. ``lossy`` on E or G makes it move bfloat16. ``update_rule`` on U selects the rule of 2D-SP,
    averaged over groups.

    Raises ValueError for a schedule that lacks a stage which this engine needs, for one whose declared accesses do
    not cover what a stage touches, for ranks that cannot be split, and for an unknown sparse optimizer.
    """

    def __init__(
        self,
        schedule: Schedule,
        spec: ModelSpec,
        sparse_optimizer: SparseOptimizer,
        dense_optimizer: DenseOptimizer,
        seed: int,
        lanes: MakeLanes = ThreadLanes,
        replica_groups: int = 1,
        memory: Memory = HOST,
    ):
        require_runnable(schedule)
        if spec.divide_by == "count":
            schedule = counted(schedule)
        self.name = schedule.name
        self._schedule = schedule
        self._exchanges = open_exchanges(replica_groups if schedule.replicated else 1)
        layout = shard_layout(spec.tables, self._exchanges.keys.world_size)
        width = state_width(sparse_optimizer, spec.tables[0].dim)
        self._table = host_table(layout, self._exchanges.keys.rank, seed, width)
        self._dense = DensePart(spec, dense_optimizer, memory, self._exchanges.allreduce)
        self._source = Source()
        self._stages = StageFunctions(
            schedule,
            sparse_optimizer,
            self._table,
            self._dense,
            spec.divide_by,
            self._exchanges,
            self._source,
            memory,
        )
        self._early_rows: Mapping[int, Mapping[str, Tensor]] = {}  # from a checkpoint, see ``state_dict``
        self._running = False
        self._step = 0
        self._first = 0
        self._failure: str | None = None
        self._reads_ahead = schedule.places["P"].offset
        self._late_write_back = any(op.ref.stage == "W" and op.ref.batch < 0 for op in schedule.ops)
        without_waiting = lanes_without_waiting(layout.world_size, self._exchanges.allreduce.world_size)
        self._lanes = lanes(folded(schedule, without_waiting), self._stages.execute)

    # ---- the Trainer interface ----

    @property
    def trained(self) -> int:
        return self._step

    def progress(self, batches: Iterator[Batch]) -> StepResult:
        """See ``Trainer``. The iterator is read on another thread, some batches ahead.

        A new iterator is read from this step on; batches of the old one that have been read are trained first. All
        ranks must pass it in the same call, else ValueError on all of them. After StopIteration the same object is
        asked again. After an error no step can follow: raises RuntimeError, which names the first error and the last
        whole step.
        """
        self._require_sound()
        with self._noting_failures():
            while (result := self._run_step(batches)) is None:
                # The step was skipped, since the data of all ranks had ended when its batch was read.
                self._lanes.drain()
                self._running = False
                if self._source.is_newest(self._step):
                    self._source.drop()
                    break
                self._source.begin_again(self._step)
            else:
                self._source.trained(self._step)
                self._step += 1
        if result is None:
            raise StopIteration
        return result

    def _run_step(self, batches: Iterator[Batch]) -> StepResult | None:
        step, ahead = self._step, self._reads_ahead
        if not self._running:
            self._source.give(range(step, step + ahead + 1), batches)
            self._begin()
        self._source.give(range(step + ahead, step + ahead + 1), batches)
        self._lanes.run_step(step)
        self._lanes.wait(Ref("O", step))
        return self._stages.take_result(step)

    def take_spans(self) -> list[Span]:
        return self._lanes.take_spans()

    def table(self, name: str) -> Tensor:
        rows = self._table.block(name).weight
        self._finish()
        return self._whole(name, rows)

    def row_state(self, name: str) -> Tensor:
        """The optimizer state of a whole table, float32 [rows, state width], on every rank; else like ``table``."""
        rows = self._table.block(name).state
        self._finish()
        return self._whole(name, rows)

    def load_table(self, name: str, rows: Tensor) -> None:
        """Set the weights of a table from ``rows``, float32 [table rows, dim], before the first step.

        Every rank gets the whole table and takes the rows that it owns. Replicas start as the first one. Collective if
        tables are replicated.
        """
        self._table.load(name, rows)
        if self._exchanges.replicas is not None:
            self._exchanges.replicas.exchanges["replicas"].broadcast(self._table.block(name).weight)

    def dense_state(self) -> Mapping[str, Tensor]:
        return self._dense.weights()

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to resume training exactly from batch ``step``. The tensors are live.

        ``in_flight``: by batch, prefetched rows that no longer match the table.
        """
        self._finish()
        return {
            "step": self._step,
            "shards": self._table.layout.world_size,
            "weight": self._table.rows.weight,
            "state": self._table.rows.state,
            "in_flight": self._in_flight(),
            "dense": self._dense.weights(),
            "dense_optimizer": self._dense.optimizer_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ``state``. Batches in flight are dropped, and the next iterator must start with batch ``step``.

        Raises ValueError for a state with a different number of shards (``resharded`` makes one that fits).
        """
        shards = self._table.layout.world_size
        if state["shards"] != shards:
            raise ValueError(f"the state has {state['shards']} shards, but there are {shards} here")
        self._finish()
        self._running = False
        self._source.drop()
        self._step = state["step"]
        self._stages.finished = self._step - 1
        self._early_rows = dict(state["in_flight"])
        self._table.rows.weight.copy_(state["weight"])
        self._table.rows.state.copy_(state["state"])
        self._dense.load(state["dense"], state["dense_optimizer"])

    def resharded(self, states: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any]:
        """A state for this rank, to resume from batch ``step``, made from the ``states`` of a different rank count.

        ``states`` has one state for each of the old ranks. Raises ValueError if rows in flight were read early,
        since those fit only the old batches.
        """
        if any(state["in_flight"] for state in states):
            raise ValueError(f"{self.name} has rows in flight that were read early: resume on the old number of ranks")
        shards = states[0]["shards"]
        # Replicas are equal, so those of the first group are enough.
        first = states[:: len(states) // shards]
        layout, rank = self._table.layout, self._table.rank
        rows = resharded_rows([Rows(state["weight"], state["state"]) for state in first], layout, rank)
        head = {"step": step, "shards": layout.world_size, "in_flight": {}}
        return {**states[0], **head, "weight": rows.weight, "state": rows.state}

    def close(self) -> None:
        """See ``Trainer``. Finishes the collectives in flight first, but asks the iterator for no other batch.

        After an error it is local: other ranks may never get here.
        """
        is_local = self._failure is not None or error_on_its_way()
        if self._running and not is_local:
            # All ranks have been given the same steps: a peer may be inside a collective of one of them.
            self._source.close()
            with contextlib.suppress(LaneStopped):
                self._lanes.drain(_DRAIN_SECONDS)
        self._running = False
        self._lanes.close()
        if not is_local:
            self._exchanges.close()

    # ---- running ----

    @contextlib.contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """Remember an error, or an interrupt, that leaves a step unfinished."""
        step = self._step
        try:
            yield
        except BaseException as error:
            cause = error.__cause__ or error if isinstance(error, LaneStopped) else error
            whole = self._stages.finished
            what = " ".join(f"{type(cause).__name__}: {cause}".split()).removesuffix(":")
            last = "no step is whole" if whole < 0 else f"the last whole step is {whole}"
            self._failure = f"step {step} ended with {what}; {last}"
            self._lanes.stop(cause)
            if isinstance(cause, StopIteration):  # not the end of the data, and must not look like it
                raise RuntimeError(f"step {step} was ended by a StopIteration that is not the iterator's") from None
            if cause is error:
                raise
            raise cause from cause.__cause__

    def _require_sound(self) -> None:
        if self._failure:
            raise RuntimeError(
                f"training cannot be continued: {self._failure}. Make a new trainer, and load a checkpoint"
            )

    def _begin(self) -> None:
        """Start a pipeline at the current step and fill it."""
        self._running = True
        self._first = self._step
        self._stages.begin_at(self._step, self._early_rows)
        self._early_rows = {}
        self._lanes.start(self._step - self._schedule.depth)
        for step in range(self._step - self._schedule.depth, self._step):
            self._lanes.run_step(step)
        if self._reads_ahead:
            self._lanes.wait(Ref("P", self._step + min(self._reads_ahead - 1, WATCHED_READS)))
        self._stages.turns.decide(self._reads_ahead)

    def _finish(self) -> None:
        """Bring the host table up to date between steps. The pipeline resumes afterwards."""
        self._require_sound()
        if not self._running:
            return
        with self._noting_failures():
            self._lanes.drain()
            # If W belongs to the next step, the newest update is still only in the buffer between steps.
            last = self._step - 1
            if self._late_write_back and last >= self._first:
                self._stages.execute(Ref("W", last))

    def _in_flight(self) -> dict[int, Mapping[str, Tensor]]:
        if not self._running:
            return {batch: rows for batch, rows in self._early_rows.items() if batch >= self._step}
        ahead = max((op.ref.batch for op in self._schedule.ops if op.ref.stage == "R"), default=0)
        found = {batch: self._stages.rows_read_early(batch) for batch in range(self._step, self._step + ahead)}
        return {batch: rows for batch, rows in found.items() if rows is not None}

    def _whole(self, name: str, blocks: Tensor) -> Tensor:
        """All rows of a table, gathered from every rank's block of it. Collective."""
        count = next(table.rows for table in self._table.layout.tables if table.name == name)
        with self._noting_failures():
            return self._exchanges.keys.all_gather(blocks).flatten(0, 1)[:count]
