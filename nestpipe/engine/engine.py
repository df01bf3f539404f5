"""The trainer that executes a schedule: its stages are functions, and lanes decide when each runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.embedding.host_table import resharded_rows
from nestpipe.embedding.retrieval_write_back import Rows
from nestpipe.engine.requirements import lanes_without_waiting, require_runnable
from nestpipe.engine.stage_functions import Stages
from nestpipe.engine.thread_lanes import Delay, LaneStopped, OneAtATime, ThreadLanes
from nestpipe.measurement.trace import Span
from nestpipe.ranks.collectives import error_on_its_way
from nestpipe.schedule.building import folded
from nestpipe.schedule.operations import Ref, Schedule
from nestpipe.trainer import DenseOptimizer, ModelSpec, SparseOptimizer, StepResult


class Engine(Stages):
    """Trains ``spec`` by ``schedule`` on every rank of the default process group (or on one rank without it).

    ``overlap=False`` runs the schedule's list one operation at a time. ``delay`` shakes the lanes (tests).
    ``replica_groups``: groups that hold a whole copy of the tables each, where the schedule has a stage D.
    Marks are obeyed: E or G that are ``lossy`` move bfloat16; ``update_rule`` on U is 2D-SP's, averaged over groups.
    Raises ValueError for a schedule that lacks a stage this engine needs or whose declared accesses
    do not cover what the stage really touches, for ranks that cannot be split, and for an unknown sparse optimizer.
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
        replica_groups: int = 1,
    ):
        require_runnable(schedule)
        super().__init__(schedule, spec, sparse_optimizer, dense_optimizer, seed, replica_groups)
        self.name = schedule.name
        self._running = False
        self._step = 0
        self._late_write_back = any(op.ref.stage == "W" and op.ref.batch < 0 for op in schedule.ops)
        lanes = folded(schedule, lanes_without_waiting(self.layout.world_size, self.exchanges["allreduce"].world_size))
        self._lanes: ThreadLanes | OneAtATime = (
            ThreadLanes(lanes, self.execute, delay=delay) if overlap else OneAtATime(lanes, self.execute)
        )

    # ---- the Trainer interface ----

    @property
    def trained(self) -> int:
        return self._step

    def progress(self, batches: Iterator[Batch]) -> StepResult:
        self.source = batches
        try:
            if not self._running:
                self.begin()
                for step in range(self._step - self.schedule.depth, self._step):
                    self._lanes.run_step(step)
            self._lanes.run_step(self._step)
            self._lanes.wait(Ref("O", self._step))
            if self._step not in self.results:  # passed over: the data of all ranks has ended
                self._lanes.drain()
                self._running = False
                raise StopIteration
        except LaneStopped as stopped:
            raise stopped.__cause__ or stopped from None
        self._step += 1
        return self.results.pop(self._step - 1)

    def take_spans(self) -> list[Span]:
        return self._lanes.take_spans()

    def table(self, name: str) -> Tensor:
        self.finish()
        t = [table.name for table in self.spec.tables].index(name)
        base, block = self.layout.base[t], self.layout.block[t]
        blocks = self.exchanges["keys"].all_gather(self.shard.weight[base : base + block])
        return blocks.flatten(0, 1)[: self.spec.tables[t].rows]

    def dense_state(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that makes training go on exactly from batch ``step``, on this rank; live tensors.

        ``in_flight``: by batch, rows that are in a buffer already and differ from the table's: read early (stale).
        """
        self.finish()
        return {
            "step": self._step,
            "shards": self.layout.world_size,
            "weight": self.shard.weight,
            "state": self.shard.state,
            "in_flight": self._early_rows(),
            "dense": {name: p.detach() for name, p in self.model.named_parameters()},
            "dense_optimizer": self.dense_optimizer.state_dict(),
        }

    def _early_rows(self) -> dict[int, dict[str, Tensor]]:
        found: dict[int, dict[str, Tensor]] = {}
        ahead = max((op.ref.batch for op in self.schedule.ops if op.ref.stage == "R"), default=0)
        for batch in range(self._step, self._step + ahead) if self._running else ():
            plan = self.plan(batch)
            rows = self.buffers[batch % self.schedule.rings["buffer"]]
            if not plan.ended and not rows.equals(self.shard, plan.rows):
                found[batch] = {"rows": plan.rows, "weight": rows.weight.clone(), "state": rows.state.clone()}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ``state``; batches in flight are dropped, and the next iterator must start with batch ``step``.

        Raises ValueError for a state of another number of shards (``resharded`` makes one that fits).
        """
        if state["shards"] != self.layout.world_size:
            raise ValueError(f"state of {state['shards']} shards, but there are {self.layout.world_size} here")
        self.finish()
        self._running = False
        self._step = state["step"]
        self.early_rows = dict(state["in_flight"])
        self.shard.weight.copy_(state["weight"])
        self.shard.state.copy_(state["state"])
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state["dense"][name])
        self.flat_gradient.zero_()
        # A copy: an optimizer takes tensors over as they are, and would go on to change the caller's.
        self.dense_optimizer.load_state_dict(deepcopy(state["dense_optimizer"]))

    def resharded(self, states: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any]:
        """A state for this rank from those of all ranks of another number of ranks, to go on from batch ``step``.

        Raises ValueError where rows in flight were read early: they fit the old batches only.
        """
        if any(state["in_flight"] for state in states):
            raise ValueError(f"{self.name} has rows in flight that were read early; they fit their own number of ranks")
        shards = states[0]["shards"]
        # Replicas are equal: those of the first group will do.
        first = states[:: len(states) // shards]
        rows = resharded_rows(
            [Rows(state["weight"], state["state"]) for state in first], self.layout, self.exchanges["keys"].rank
        )
        head = {"step": step, "shards": self.layout.world_size, "in_flight": {}}
        return {**states[0], **head, "weight": rows.weight, "state": rows.state}

    def close(self) -> None:
        self._lanes.close()
        if not error_on_its_way():
            for exchange in self.exchanges.values():
                exchange.close()

    # ---- running ----

    def begin(self) -> None:
        """Start a pipeline at the current step: what earlier batches left in the rings is void."""
        self._running = True
        self.begin_at(self._step)
        self._lanes.start(self._step - self.schedule.depth)

    def finish(self) -> None:
        """Bring the host table up to date between steps; the pipeline goes on afterwards."""
        if not self._running:
            return
        self._lanes.drain()
        # Between steps the newest update is in the buffer alone, where W belongs to the next step.
        last = self._step - 1
        if self._late_write_back and last >= self.first:
            self.execute(Ref("W", last))
