"""NestPipe in a TorchRec user's own loop: the model stays as it is, and one object replaces the pipeline.

    pipeline = NestPipeline(model, dense_optimizer=lambda p: torch.optim.Adam(p, lr=1e-3), micro_batches=8)
    result = pipeline.progress(batches)          # like TrainPipelineSparseDist.progress

``model`` is unsharded and has any number of torchrec's ``EmbeddingBagCollection`` and ``EmbeddingCollection`` modules,
anywhere. It maps a batch to a loss, or to (loss, anything), as TorchRec's pipelines expect. In a frozen window its
loss must be separable by sample; ``nestpipe.adoption.separable`` checks that. Dropout works, but it draws other random
numbers than for a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.adoption.adopted import AdoptedModel, Discovery, adopt_collections, copied, discover, release
from nestpipe.adoption.batches import BatchFormat, Reads, sources
from nestpipe.adoption.collections import (
    find_collections,
    require_adoptable,
    require_whole_gradients,
    stated_optimizer,
    table_configs,
    tables_of,
    whole_tables,
)
from nestpipe.adoption.lookups import Lookups, adopted_collections, tables_read_by
from nestpipe.adoption.losses import AVERAGES, REDUCTIONS, Losses
from nestpipe.adoption.outputs import in_order, merged
from nestpipe.adoption.separable import batch_norms, require_no_batch_statistics
from nestpipe.adoption.stream import Stream
from nestpipe.adoption.structures import OwnTypes
from nestpipe.clustering import clustering
from nestpipe.data.batch import Batch
from nestpipe.engine.engine import Engine
from nestpipe.methods import find_method
from nestpipe.ranks.agreement import outcomes
from nestpipe.trainer import DenseOptimizer, ModelSpec, SparseOptimizer, StepResult, Trainer


class NamedParameters(list[nn.Parameter]):
    """The parameters that a dense optimizer gets. ``named``: the same by their names in the model."""

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        super().__init__(named.values())
        self.named = named


class NestPipeline:
    """Trains ``model`` with a NestPipe method. It has the interface of TorchRec's train pipelines.

    ``dense_optimizer``: function from a list of parameters to a torch optimizer, for everything outside the tables.
    The list's ``named`` has them by name. ``sparse_optimizer``: None uses the one that ``apply_optimizer_in_backward``
    set on the tables. ``method``: any method of ``nestpipe methods`` that the engine runs. ``clustering``: see
    ``nestpipe.clustering``. ``check``: check that the loss is separable by sample.

    ``reduction``: what the loss is. ``mean``: the mean over the samples that the model is given; every sample of the
    global batch then has the same weight. With ``average="ranks"`` it is the mean of the ranks' means, as in
    DistributedDataParallel, which differs if ranks have different numbers of samples. ``sum``: their sum; what is
    trained is the mean over ranks of these sums, as in DistributedDataParallel. ``none``: one loss per sample, of
    which the mean is trained. A model that returns ``Summed(total, count)`` says itself what to divide by.

    ``preprocess``: applied to each batch on the thread that reads the data, for hashing ids and the like. ``shared``:
    fields whose tensors have no row per sample, so that every micro-batch gets them whole. ``own_types``: by type of
    a batch or of a part of it, (take apart into a dict or tuple, put together from such).

    Tables start from the collections' weights. If those are on the meta device, rows are drawn as their configs say,
    as a function of (seed, table, row). Dense weights and buffers start as those of rank 0. The first
    ``progress`` is collective and builds the engine. Raises NotSeparable or BatchError. Raises ValueError for a model
    that cannot be adopted, see ``nestpipe.adoption.collections``.
    """

    def __init__(
        self,
        model: nn.Module,
        dense_optimizer: DenseOptimizer,
        sparse_optimizer: SparseOptimizer | None = None,
        micro_batches: int = 8,
        method: str = "nestpipe",
        reduction: str = "mean",
        clustering: bool = False,
        seed: int = 0,
        check: bool = True,
        preprocess: Callable[[Any], Any] | None = None,
        shared: Sequence[str] = (),
        own_types: OwnTypes | None = None,
        average: str = "samples",
    ) -> None:
        if micro_batches < 1:
            raise ValueError(f"micro_batches is {micro_batches}; it must be at least 1")
        if isinstance(dense_optimizer, torch.optim.Optimizer) or not callable(dense_optimizer):
            raise ValueError(
                f"dense_optimizer is a {type(dense_optimizer).__name__}; it must be a function from parameters to an "
                "optimizer, such as lambda p: torch.optim.AdamW(p)"
            )
        for name, value, known in (("reduction", reduction, REDUCTIONS), ("average", average, AVERAGES)):
            if value not in known:
                raise ValueError(f"{name} '{value}' is not one of {', '.join(known)}")
        require_adoptable(model)
        collections = find_collections(model)
        self._tables = table_configs(collections)
        self._sparse = sparse_optimizer or stated_optimizer(collections)
        self._method = find_method(method)
        if self._method.observed:
            raise ValueError(f"method '{self._method.name}' is not run by the engine, so it cannot adopt a model")
        self._micro_batches = self._method.micro_batches_of(micro_batches)
        if self._micro_batches > 1:
            require_no_batch_statistics(batch_norms(model))
        self._model = model
        self._losses = Losses(reduction, average)
        self._form = BatchFormat(own_types, (shared,) if isinstance(shared, str) else shared)
        self._preprocess = preprocess
        self._clustering = clustering
        self._seed = seed
        self._check = check and self._micro_batches > 1
        self._stream: Stream | None = None
        self._reads: Reads = tables_read_by(collections)
        self._lookups = Lookups()
        self._trainer: Engine | None = None
        self._adopted: AdoptedModel | None = None
        self._ended = ""
        self.optimizer: Any = _dense_optimizer(model, collections, dense_optimizer)
        """The dense optimizer; None if the model has no weights outside its tables."""

    def progress(self, batches: Iterator[Any]) -> StepResult:
        """Train one step. Raises StopIteration once the data of all ranks has ended and every batch has been trained.

        ``batches``: the same iterator at every step; a new iterator starts another pass over the data. Batches of the
        old one that have been read are trained first. Another thread reads it, some batches ahead.
        """
        self._require_ready(batches)
        if self._stream is None or self._stream.source is not batches:
            self._stream = Stream(batches, self._preprocess, self._converted, self._form)
        if self._trainer is None:
            self._begin(self._stream)
        assert self._adopted is not None
        self._adopted.outputs.clear()
        try:
            return self.trainer.progress(self._stream)
        except StopIteration:
            self._stream = None
            raise

    def _require_ready(self, batches: Iterator[Any]) -> None:
        if self._ended:
            raise RuntimeError(f"this pipeline was ended by {self._ended}(): make a new NestPipeline to train on")
        if not hasattr(batches, "__next__"):
            raise ValueError(
                f"progress takes an iterator, the same one at every step, not a {type(batches).__name__}: "
                "write batches = iter(loader) before the loop"
            )
        if not self._model.training:
            raise RuntimeError(
                "the model is in eval mode, in which progress() does not train: call model.train() first, and evaluate "
                "what pipeline.export() returns"
            )
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "progress() trains, but gradients are switched off: leave torch.no_grad(), and evaluate what "
                "pipeline.export() returns"
            )

    @property
    def outputs(self) -> list[Any]:
        """What the model returned next to its loss in the last step, detached, in the order of the batch.

        A list with one piece for each micro-batch that had samples. See ``output`` for all in one.
        """
        found = self._adopted.outputs if self._adopted else []
        return in_order([piece for _, piece in found], [numbers for numbers, _ in found])

    @property
    def output(self) -> Any:
        """``outputs`` as one: tensors with a row per sample are concatenated; of anything else there is a list."""
        found = self._adopted.outputs if self._adopted else []
        return merged([piece for _, piece in found], [numbers for numbers, _ in found])

    @property
    def trainer(self) -> Trainer:
        """The engine underneath: tables, spans, state. Raises RuntimeError before the first ``progress``."""
        if self._trainer is None:
            raise RuntimeError("no batch has been seen yet: the first progress() builds the engine")
        return self._trainer

    def export(self) -> nn.Module:
        """The model as it was passed in, with its own collections and everything trained so far, to evaluate or save.

        Every rank gets a copy with whole tables, which must fit in memory. Locks and process groups are shared with
        the model. Collective; call it between steps. Raises RuntimeError before the first step and after ``close``.
        """
        if self._ended == "close":
            raise RuntimeError(
                "this pipeline was closed, and its tables are gone: call export() or detach() before close()"
            )
        return copied(self._model, self._whole() if not self._ended else {})

    def detach(self) -> nn.Module:
        """End training. Returns the model that was passed in, with its own collections and whole trained tables.

        Collective. Raises RuntimeError after an error, since a step was then not finished, and after ``close``.
        """
        if self._ended == "close" and self._trainer is not None:
            raise RuntimeError("this pipeline was closed, and its tables are gone: call detach() instead of close()")
        if self._trainer is not None and not self._ended:
            tables = self._whole()
            self.close()
            release(self._model, {name: table.clone() for name, table in tables.items()})
        self._ended = "detach"
        return self._model

    def close(self) -> None:
        """End threads and process groups. Collective. The model keeps no tables; see ``detach``."""
        if self._trainer is not None and not self._ended:
            self._trainer.close()
        self._ended = self._ended or "close"

    # ---- the first batch ----

    def _begin(self, stream: Stream) -> None:
        """Find out what the model does with its first batch, agree on it, and build the engine. Collective."""
        require_adoptable(self._model)
        require_whole_gradients(self._model, self._micro_batches)
        collections = find_collections(self._model)
        tables = {name: t.weight for c in collections.values() for name, t in tables_of(c).items()}
        starts = whole_tables(collections)
        adopt_collections(self._model, self._lookups)
        try:
            known = self._discovered(stream, tables)
            for result in known:  # a rank without data learns from the others, and all know the same
                for source, names in result.reads.tables.items():
                    for name in names:
                        self._reads.add(name, source)
                self._reads.seen |= result.reads.seen
            self._build(known[0].summed, starts)
        except BaseException:
            release(self._model)
            raise

    def _discovered(self, stream: Stream, tables: dict[str, Tensor]) -> list[Discovery]:
        """What the ranks that have samples found out. Collective. Raises StopIteration if no rank has any data."""
        error, found, has_data = None, None, False
        try:
            raw = stream.peek(2 if self._check else 1)
            has_data = raw is not None
            if has_data:
                reads = replace(self._reads, tables={}, seen=set())
                batch = self._form.to_batch(raw, 0, reads)
                reads.seen.update(source.path for source in sources(batch))
                if len(batch):
                    check = self._micro_batches if self._check else 0
                    found = discover(self._model, tables, self._lookups, self._form, self._losses, batch, reads, check)
        except Exception as failed:  # raised below, so that no rank waits for this one
            error = failed
        results, failure = outcomes(None if error is None else str(error), (has_data, found))
        if error is not None:
            raise error
        if failure:
            raise ValueError(f"rank {failure.rank}: {failure.why}")
        known = [result for _, result in results if result is not None]
        if not any(any_data for any_data, _ in results):
            self._stream = None
            raise StopIteration
        if not known:
            raise ValueError("the first batches of all ranks hold no sample, so nothing is known of the model")
        if len({result.summed for result in known}) > 1:
            raise ValueError("the model returns Summed on some ranks and another loss on others; return one kind")
        return known

    def _build(self, summed: bool, starts: dict[str, Tensor]) -> None:
        def build(embeddings: nn.Module) -> nn.Module:
            self._adopted = AdoptedModel(
                self._model,
                embeddings,
                self._lookups,
                self._form,
                self._losses,
                summed,
                self._micro_batches,
                self._check,
            )
            return self._adopted

        spec = ModelSpec(self._tables, build, summed=True, divide_by=self._losses.divide_by(summed))
        trainer = self._method.build(spec, self._sparse, lambda _: self.optimizer, self._seed, self._micro_batches)
        assert isinstance(trainer, Engine)
        for name, values in starts.items():
            trainer.load_table(name, values)
        # The engine has the rows now. Only this reference to them is dropped: others may hold the tensors.
        for collection in adopted_collections(self._model).values():
            for table in collection.adopted.tables.values():
                if not table.weight.is_meta:
                    table.weight.data = table.weight.data.new_empty(0, table.weight.shape[1])
        self._trainer = trainer

    def _converted(self, batch: Any, first_id: int) -> Batch:
        converted = self._form.to_batch(batch, first_id, self._reads)
        if not self._clustering:
            return converted
        return clustering.cluster_batch(converted, self._tables, self._micro_batches)

    def _whole(self) -> dict[str, Tensor]:
        return {table.name: self.trainer.table(table.name) for table in self._tables}


def _dense_optimizer(model: nn.Module, collections: dict[str, Any], make: DenseOptimizer) -> Any:
    tables = {id(p) for collection in collections.values() for p in collection.parameters()}
    named = {name: p for name, p in model.named_parameters() if id(p) not in tables}
    if meta := [name for name, p in named.items() if p.is_meta]:
        raise ValueError(f"weight '{meta[0]}' is on the meta device: give all weights outside the tables their values")
    return make(NamedParameters(named)) if named else None
