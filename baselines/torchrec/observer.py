"""What a step of real TorchRec does and when, seen from outside: no order, number or asynchrony is changed.

On a CPU all of TorchRec runs on the host thread except the collectives, which run on gloo's and DDP's threads.
The list says what each span of batch t covers and, in parentheses, what observes it. There is one host thread, so
spans of P, H, R, F, B, U and O never overlap; K, E, G and A are in flight at the same time:

P  ``next`` on the iterator, and the making of a KeyedJaggedTensor                  (the iterator we feed)
H  ``batch.to(device)``                                                             (the batch we feed)
K  in pieces: the host's part, ``start_sparse_data_dist`` (bucketing, launch of the All2All of sizes), that All2All's
   flight, the host's part of ``wait_sparse_data_dist`` (waiting for the sizes, launch of the All2Alls of lengths and
   keys), their flight. A flight ends when the host sees it completed: it looks whenever any span here begins or
   ends, at the latest when the lookup needs the keys                          (wrapped instance methods, Work)
R  assembling the received keys and the lookup, to the start of E's send copy             (module hooks)
E  from the permutation before the send, through the All2All, to the received rows split per feature
F  from there to the loss; what a model's dense part does before it uses the embeddings counts as E
B  from ``backward()`` to the launch of G
G  from the launch of the gradient All2All, through its wait, division and permutation, to the update
U  the lookup's backward, which contains the fused optimizer                                 (autograd node hooks)
A  DDP's AllReduce, first launch to last completion, by DDP's own timers                (``Logger``)
D  ``DMPCollection.sync()``, if tables are replicated: the AllReduce of weights and optimizer state over replicas
O  ``optimizer.step()``

The All2Alls are seen by replacing ``torch.distributed.all_to_all_single`` while a step of ours runs: the
replacement calls the original, keeps the returned Work, and counts bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from baselines.torchrec.batches import KeyedBatch
from nestpipe.measurement.trace import Span
from nestpipe.schedule.stages import STAGES


class _Flight(NamedTuple):
    """All2Alls of K that have been in flight since ``start``."""

    start: int
    works: list[dist.Work]


class Observer:
    """Spans and All2All bytes of one trainer. ``attach`` it to the sharded module and the pipeline, once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.spans: list[Span] = []
        self.sent_bytes = 0
        self._group = group
        self._rank = dist.get_rank(group)
        self._thread = threading.get_ident()
        self._batch = -1
        self._phase = ""  # the float All2All of a forward is E, that of a backward is G
        self._flights: dict[int, _Flight] = {}
        self._launched: list[dist.Work] | None = None  # All2Alls of keys, while some are launched
        self._last_mark = 0
        self._began: dict[str, int] = {}

    # ---- recording ----

    def _mark(self, opens: bool = False) -> int:
        """The time now. Ends the flights of keys that are seen to have completed.

        ``opens``: a span begins here. It did not wait for a flight that has completed since the last mark, so that
        flight must not seem to end when the span begins: it ends at the last mark.
        """
        now = time.perf_counter_ns()
        for batch, flight in list(self._flights.items()):
            if all(work.is_completed() for work in flight.works):
                self._land(batch, max(flight.start, self._last_mark) if opens else now)
        self._last_mark = now
        return now

    def _land(self, batch: int, now: int) -> None:
        """End the flight of a batch's keys, if there is one."""
        if batch in self._flights:
            self._add("K", batch, self._flights.pop(batch).start, now)

    def _add(self, stage: str, batch: int, start: int, end: int) -> None:
        meaning = STAGES[stage]
        self.spans.append(Span(stage, batch, int(meaning.per_micro_batch), meaning.lane, start, end))

    def _begin(self, stage: str) -> None:
        self._began[stage] = self._mark(opens=True)

    def _end(self, stage: str) -> None:
        """End the stage's span of the batch in training, if it has not ended already."""
        now = self._mark()
        if stage in self._began:
            self._add(stage, self._batch, self._began.pop(stage), now)

    @contextmanager
    def host(self, stage: str, batch: int) -> Iterator[None]:
        """A span of the ``with`` block; no span if it raises (StopIteration: the end of the data is not a batch)."""
        start = self._mark(opens=True)
        yield
        self._add(stage, batch, start, self._mark())

    # ---- the step ----

    @contextmanager
    def step(self) -> Iterator[None]:
        """While a step runs, observe the All2Alls of the host thread on our group."""
        original = dist.all_to_all_single
        self.sent_bytes = 0

        def all_to_all_single(
            output: Tensor,
            input: Tensor,
            output_split_sizes: Any = None,
            input_split_sizes: Any = None,
            group: Any = None,
            async_op: bool = False,
        ) -> dist.Work | None:
            ours = threading.get_ident() == self._thread and group is self._group
            if ours and input.is_floating_point():
                if self._phase == "G":
                    self._end("B")
                    self._begin("G")
                away = sum(n for peer, n in enumerate(input_split_sizes) if peer != self._rank)
                self.sent_bytes += away * input.element_size()
            work = original(output, input, output_split_sizes, input_split_sizes, group, async_op)
            if ours and not input.is_floating_point() and self._launched is not None:
                self._launched.append(work)
            return work

        dist.all_to_all_single = all_to_all_single
        try:
            yield
        finally:
            dist.all_to_all_single = original

    # ---- hooks ----

    def attach(
        self, collection: ShardedEmbeddingCollection, pipeline: TrainPipelineSparseDist, dmp: DistributedModelParallel
    ) -> None:
        """``dmp`` wraps DistributedDataParallel if there are dense weights."""
        self._watch_keys(pipeline)
        self._watch_lookup(collection)
        self._watch_dense(pipeline, dmp._dmp_wrapped_module)
        if isinstance(dmp, DMPCollection):
            self._watch_replicas(dmp)

    def _watch_replicas(self, dmp: DMPCollection) -> None:
        synchronise = dmp.sync

        def timed(include_optimizer_state: bool = True) -> None:
            with self.host("D", self._batch):
                synchronise(include_optimizer_state)

        dmp.sync = timed

    def _watch_keys(self, pipeline: TrainPipelineSparseDist) -> None:
        start_dist, wait_dist = pipeline.start_sparse_data_dist, pipeline.wait_sparse_data_dist
        numbers: dict[int, int] = {}

        def start(batch: KeyedBatch | None, context: Any) -> None:
            if batch is None:
                return start_dist(batch, context)
            numbers[context.index] = batch.number
            route(batch.number, lambda: start_dist(batch, context))

        def wait(context: Any) -> None:
            number = numbers.pop(context.index)
            self._land(number, self._mark(opens=True))
            route(number, lambda: wait_dist(context))

        def route(number: int, run: Callable[[], None]) -> None:
            works = self._launched = []
            with self.host("K", number):
                run()
            self._launched = None
            self._flights[number] = _Flight(self._last_mark, works)

        pipeline.start_sparse_data_dist, pipeline.wait_sparse_data_dist = start, wait

    def _watch_lookup(self, collection: ShardedEmbeddingCollection) -> None:
        def forward_begins(*_: Any) -> None:
            self._begin("R")
            if self._batch in self._flights:
                self._began.pop("R")  # the keys are still in flight: R begins when they have arrived

        def lookup_begins(*_: Any) -> None:
            if "R" not in self._began:
                self._land(self._batch, self._mark())
                self._begin("R")

        def rows_found(*_: Any) -> None:
            self._end("R")
            self._began.setdefault("E", self._mark())

        def forward_launched(module: nn.Module, inputs: Any, awaitable: Any) -> None:
            awaitable.callbacks.append(embedded)

        def embedded(features: Any) -> Any:
            self._end("E")
            self._begin("F")
            return features

        def looked_up(module: nn.Module, inputs: Any, rows: Tensor) -> None:
            node = rows.grad_fn
            if node is not None:
                node.register_prehook(update_begins)
                node.register_hook(update_ends)

        def update_begins(*_: Any) -> None:
            self._end("B")
            self._end("G")
            self._begin("U")

        def update_ends(*_: Any) -> None:
            self._end("U")

        collection.register_forward_pre_hook(forward_begins)
        collection.register_forward_hook(forward_launched)
        for lookup in collection._lookups:
            lookup.register_forward_pre_hook(lookup_begins)
            for kernel in lookup._emb_modules:
                kernel.emb_module.register_forward_hook(looked_up)
        for output in collection._output_dists:
            output.register_forward_pre_hook(rows_found)

    def _watch_dense(self, pipeline: TrainPipelineSparseDist, ddp: nn.Module) -> None:
        backward, optimizer_step, forward = pipeline._backward, pipeline._optimizer_step, pipeline._model_fwd

        def timed_forward(batch: KeyedBatch) -> Any:
            self._batch, self._phase = batch.number, "E"
            return forward(batch)

        def timed_backward(losses: Tensor) -> None:
            self._phase = "G"
            self._begin("B")
            backward(losses)
            self._end("B")
            self._end("G")
            if isinstance(ddp, DistributedDataParallel):
                self._add_allreduce(ddp)

        def timed_step() -> None:
            with self.host("O", self._batch):
                optimizer_step()

        pipeline._model_fwd = timed_forward
        pipeline._backward = timed_backward
        pipeline._optimizer_step = timed_step
        if isinstance(ddp, DistributedDataParallel):
            ddp._set_ddp_runtime_logging_sample_rate(1)

    def loss_computed(self) -> None:
        """The forward of the model has ended."""
        self._end("F")

    def _add_allreduce(self, ddp: DistributedDataParallel) -> None:
        assert ddp.logger is not None
        ddp.logger.set_runtime_stats_and_log()
        times = ddp._get_ddp_logging_data()
        start, end = times.get("backward_comm_time_start", 0), times.get("backward_comm_time_end", 0)
        if start and end >= start:
            # DDP's timers run on the wall clock.
            offset = time.time_ns() - time.perf_counter_ns()
            self._add("A", self._batch, start - offset, end - offset)
