"""NestPipe in a TorchRec user's own loop: the model stays as it is, and one object replaces the pipeline.

    pipeline = NestPipeline(model, dense_optimizer=lambda p: torch.optim.Adam(p, lr=1e-3), micro_batches=8)
    result = pipeline.progress(batches)          # like TrainPipelineSparseDist.progress

``model`` is unsharded and has any number of torchrec's ``EmbeddingBagCollection`` and ``EmbeddingCollection`` modules,
anywhere. It maps a batch to a loss, or to (loss, anything), as TorchRec's pipelines expect. In a frozen window its
loss must be separable by sample; ``nestpipe.adoption.separable`` checks that before the first step. Dropout works, but
it draws other random numbers than for a whole batch. No check finds a model that keeps state between batches in plain
attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.adoption.batches import ForeignBatches
from nestpipe.adoption.collections import (
    HandedRows,
    drop_in,
    find_collections,
    read_keys,
    stated_optimizer,
    table_configs,
    tables_of,
    whole_tables,
)
from nestpipe.adoption.separable import require_no_batch_statistics, require_separable_loss
from nestpipe.clustering.clustering import clustered
from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.tables import TableConfig
from nestpipe.engine.engine import Engine
from nestpipe.methods import find_method
from nestpipe.ranks.agreement import outcomes
from nestpipe.trainer import DenseOptimizer, ModelSpec, SparseOptimizer, StepResult, Trainer

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class _Losses:
    """Turns a model's output into the sum of its loss over samples."""

    reduction: str

    def total(self, output: Any, samples: int) -> Tensor:
        """The sum of the loss over ``samples`` samples. Raises ValueError if ``output`` has no such loss."""
        loss = output[0] if isinstance(output, tuple | list) and len(output) else output
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"the model must return its loss, or (loss, anything); it returned {type(output).__name__}"
            )
        if self.reduction == "mean" and loss.numel() != 1:
            raise ValueError(f"the model returned {loss.numel()} losses, but reduction='mean' takes one: pass 'none'")
        return (loss * samples).reshape(()) if self.reduction == "mean" else loss.sum()


class AdoptedModel(nn.Module):
    """A user's model as the engine runs it: ``Batch`` in, the sum of its losses out.

    Its embedding collections are replaced in place by drop-ins that pool the rows that the engine hands out.
    """

    def __init__(self, model: nn.Module, embeddings: nn.Module, batches: ForeignBatches, losses: _Losses) -> None:
        super().__init__()
        self.model = model
        self._batches = batches
        self._losses = losses
        self.outputs: list[Any] = []
        self._rows = HandedRows(embeddings)
        for path, collection in find_collections(model).items():
            _replace(self, f"model.{path}" if path else "model", drop_in(path, collection, self._rows))

    def forward(self, part: Batch) -> Tensor:
        self._rows.closed = False
        try:
            output = self.model(self._batches.from_batch(part))
        finally:
            self._rows.closed = True
        if isinstance(output, tuple | list) and len(output) > 1:
            self.outputs.append(_detached(output[1]))
        return self._losses.total(output, len(part))


class NestPipeline:
    """Trains ``model`` with a NestPipe method. It has the interface of TorchRec's train pipelines.

    ``dense_optimizer``: function from a list of parameters to a torch optimizer, for everything outside the tables.
    ``sparse_optimizer``: None uses the one that ``apply_optimizer_in_backward`` set on the tables. ``method``: any
    method of ``nestpipe methods`` that the engine runs. ``reduction``: whether the loss is the mean over samples,
    their sum, or one value per sample (``none``). ``clustering``: see ``nestpipe.clustering``. ``check``: check on the
    first batch that the loss is separable by sample.

    Tables start from the collections' weights. If those are on the meta device, rows are drawn from torchrec's default
    range as a function of (seed, table, row). The first ``progress`` is collective and builds the engine.
    Raises NotSeparable or BatchError. Raises ValueError for a model that cannot be adopted: it has tables of unequal
    dims (give all of them the largest), rows that are not float32, or no collection at all.
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
    ) -> None:
        if micro_batches < 1:
            raise ValueError(f"micro_batches is {micro_batches}; it must be at least 1")
        if isinstance(dense_optimizer, torch.optim.Optimizer) or not callable(dense_optimizer):
            raise ValueError(
                f"dense_optimizer is a {type(dense_optimizer).__name__}; it must be a function from parameters to an "
                "optimizer, such as lambda p: torch.optim.AdamW(p)"
            )
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction '{reduction}' is not one of {', '.join(REDUCTIONS)}")
        collections = find_collections(model)
        if not collections:
            raise ValueError("the model holds no EmbeddingBagCollection or EmbeddingCollection; is it sharded already?")
        self._tables = table_configs(collections)
        self._reads = read_keys(collections)
        self._sparse = sparse_optimizer or stated_optimizer(collections)
        self._method = find_method(method)
        self._micro_batches = self._method.micro_batches_of(micro_batches)
        if self._micro_batches > 1:
            require_no_batch_statistics(model)
        self._model = model
        self._dense = dense_optimizer
        self._losses = _Losses(reduction)
        self._clustering = clustering
        self._seed = seed
        self._check = check and self._micro_batches > 1
        self._source: Iterator[Any] | None = None
        self._batches: Iterator[Batch] = iter(())
        self._trainer: Trainer | None = None
        self._adopted: AdoptedModel | None = None
        self._skeleton: nn.Module = nn.Module()

    def progress(self, batches: Iterator[Any]) -> StepResult:
        """Train one step. Raises StopIteration once the data of all ranks has ended and every batch has been trained.

        ``batches``: the same iterator at every step; a new iterator starts another pass over the data.
        """
        if not isinstance(batches, Iterator):
            raise ValueError(
                f"progress takes an iterator, the same one at every step, not a {type(batches).__name__}: "
                "write batches = iter(loader) before the loop"
            )
        if self._source is not batches:
            self._source = batches
            self._batches = self._converted(batches)
        if self._adopted is not None:
            self._adopted.outputs.clear()
        return self.trainer.progress(self._batches)

    @property
    def outputs(self) -> list[Any]:
        """The second part of the model's outputs in the last step, detached: one per micro-batch that had samples."""
        return self._adopted.outputs if self._adopted else []

    @property
    def trainer(self) -> Trainer:
        """The engine underneath: tables, spans, state. Raises RuntimeError before the first ``progress``."""
        if self._trainer is None:
            raise RuntimeError("no batch has been seen yet: the first progress() builds the engine")
        return self._trainer

    def export(self) -> nn.Module:
        """The model as it was passed in, with its own collections and everything trained so far, to evaluate or save.

        Every rank gets a copy with whole tables, which must fit in memory. Collective; call it between steps.
        """
        trainer = self.trainer
        assert self._adopted is not None
        model = copy.deepcopy(self._skeleton)
        for collection in find_collections(model).values():
            for name, table in tables_of(collection).items():
                table.weight = nn.Parameter(trainer.table(name).clone())
        model.load_state_dict(self._adopted.model.state_dict(), strict=False)  # tables are not in it
        return model

    def close(self) -> None:
        """End threads and process groups. Collective."""
        if self._trainer is not None:
            self._trainer.close()

    def detach(self) -> None:
        """``close``, under the name that TorchRec's pipelines have for the end of training."""
        self.close()

    def _converted(self, source: Iterator[Any]) -> Iterator[Batch]:
        example = next(source, None)
        if self._trainer is None:
            error = self._first_error(example)
            _raise_on_all_ranks(error)
            self._build(ForeignBatches(self._reads, example))
        if example is None:
            return iter(())
        foreign = ForeignBatches(self._reads, example)
        batches = foreign.batches(_and_then(example, source))
        return clustered(batches, self._tables, self._micro_batches) if self._clustering else batches

    def _first_error(self, example: Any) -> Exception | None:
        """The error that keeps this rank from training, found on its first batch, or None."""
        if example is None:
            return ValueError("the first iterator holds no batch, so the type of batches is unknown")
        foreign = ForeignBatches(self._reads, example)
        try:
            first = foreign.to_batch(example, 0)
            if self._check:
                self._check_separable(foreign, first)
        except Exception as error:  # raised by ``_raise_on_all_ranks``, so that no rank waits for this one
            return error
        return None

    def _build(self, foreign: ForeignBatches) -> None:
        tables = whole_tables(find_collections(self._model))  # before the drop-ins replace them
        self._skeleton = _copy_without_tables(self._model, "meta")

        def build(embeddings: nn.Module) -> nn.Module:
            self._adopted = AdoptedModel(self._model, embeddings, foreign, self._losses)
            return self._adopted

        spec = ModelSpec(self._tables, build, summed=True)
        trainer = self._method.build(spec, self._sparse, self._dense, self._seed, self._micro_batches)
        if not isinstance(trainer, Engine):
            raise ValueError(f"method '{self._method.name}' is not run by the engine, so it cannot adopt a model")
        for name, values in tables.items():
            trainer.load_table(name, values)
        self._trainer = trainer

    def _check_separable(self, foreign: ForeignBatches, batch: Batch) -> None:
        """Check with made-up rows: whether samples mix does not depend on the values of rows."""
        adopted = AdoptedModel(_copy_without_tables(self._model), _MadeUpRows(self._tables), foreign, self._losses)

        def loss_sum(model: nn.Module, part: Batch) -> Tensor:
            made_up = next(m for m in model.modules() if isinstance(m, _MadeUpRows))
            made_up.part = part
            return model(part).sum()

        require_separable_loss(loss_sum, adopted, batch)


class _MadeUpRows(nn.Module):
    """Rows that are a function of the key, to check the model before there are tables."""

    def __init__(self, tables: tuple[TableConfig, ...]) -> None:
        super().__init__()
        self._tables = tables
        self.part: Batch | None = None
        self._values = torch.empty(1009, tables[0].dim).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))

    def forward(self, sparse: Any) -> dict[str, Jagged]:
        assert self.part is not None
        return {
            feature: Jagged(self._values[jagged.values() % len(self._values)], jagged.lengths())
            for table in self._tables
            for feature in table.features
            for jagged in (self.part.sparse[feature],)
        }


def _raise_on_all_ranks(error: Exception | None) -> None:
    """Raises this rank's ``error``, or ValueError with the error of the first rank that has one. Collective."""
    _, failed = outcomes(None if error is None else str(error))
    if error is not None:
        raise error
    if failed:
        raise ValueError(f"rank {failed.rank}: {failed.why}")


def _copy_without_tables(model: nn.Module, device: str | None = None) -> nn.Module:
    """A copy of ``model`` that shares its tables or, if ``device`` is given, has tables without values on it."""
    weights = [p for collection in find_collections(model).values() for p in collection.parameters()]
    memo = {id(p): p if device is None else nn.Parameter(torch.empty_like(p, device=device)) for p in weights}
    return copy.deepcopy(model, memo=memo)


def _replace(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return tuple(_detached(part) for part in value) if isinstance(value, tuple | list) else value


def _and_then(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest
