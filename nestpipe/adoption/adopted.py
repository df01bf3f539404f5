"""A user's model as the engine runs it: ``Batch`` in, the sum of its losses out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.adoption import separable
from nestpipe.adoption.batches import BatchFormat, Reads
from nestpipe.adoption.collections import find_collections
from nestpipe.adoption.lookups import FromEngine, FromTables, Lookups, adopt, adopted_collections, give_back
from nestpipe.adoption.losses import Losses
from nestpipe.adoption.outputs import second_part
from nestpipe.adoption.undisturbed import changed_buffers, undisturbed
from nestpipe.data.batch import Batch


class AdoptedModel(nn.Module):
    """``model``, whose collections are adopted, with rows from ``embeddings`` (the engine's).

    ``outputs``: of the micro-batches since the last ``clear``, the numbers of their samples and what the model
    returned beside the loss. ``looks``: whether to look again at later batches, see ``separable``.
    """

    def __init__(
        self,
        model: nn.Module,
        embeddings: nn.Module,
        lookups: Lookups,
        form: BatchFormat,
        losses: Losses,
        summed: bool,
        micro_batches: int,
        looks: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self._embeddings = embeddings
        self._lookups = lookups
        self._form = form
        self._losses = losses
        self._summed = summed
        self._micro_batches = micro_batches
        self._looks = looks
        self._calls = 0
        self._previous: tuple[Batch, FromEngine] | None = None
        self.outputs: list[tuple[Tensor, Any]] = []

    def forward(self, part: Batch) -> Tensor | tuple[Tensor, Tensor]:
        batch, handed = self._form.from_batch(part)
        rows = FromEngine(self._embeddings({}), part, handed)
        with self._lookups.using(rows):
            output = self.model(batch)
        total, count = self._losses.of(output, len(part))
        if (count is not None) != self._summed:
            raise ValueError("the model returns Summed for some batches and another loss for others; return one kind")
        self.outputs.append((part.sample_ids, second_part(output)))
        if self._looks:
            self._look_again(part, rows)
        return total if count is None else (total, count)

    def _look_again(self, part: Batch, rows: FromEngine) -> None:
        previous, self._previous = self._previous, (part, rows) if len(part) == 1 else None
        due = separable.is_due(self._calls, self._micro_batches)
        self._calls += 1
        if len(part) == 1 and previous is not None and previous[0].form is part.form:
            # Two micro-batches of one sample each are looked at together.
            whole = separable.joined(previous[0], part)
            index = torch.arange(2)
            rows = previous[1].joined(rows)
        elif due and len(part) > 1:
            whole, index = part, torch.arange(len(part))
        else:
            return
        with undisturbed(self.model):
            parts = [self._sums(whole, rows, i) for i in (index, *(h for h in separable.halves(len(whole))))]
        separable.require_equal_sums(parts[0], parts[1:])

    def _sums(self, whole: Batch, rows: FromEngine, index: Tensor) -> separable.LossSums:
        part = whole.select(index)
        batch, handed = self._form.from_batch(part)
        with self._lookups.using(rows.select(part, handed, index)):
            return _sums(self._losses, self.model(batch), len(part))


@dataclass(frozen=True)
class Discovery:
    """What one pass over a rank's first batch tells of a model."""

    reads: Reads
    summed: bool


def discover(
    model: nn.Module,
    tables: Mapping[str, Tensor],
    lookups: Lookups,
    form: BatchFormat,
    losses: Losses,
    batch: Batch,
    reads: Reads,
    check: bool,
) -> Discovery:
    """Run the adopted ``model`` on ``batch`` with rows of ``tables``, and record in ``reads`` what it looks up.

    ``check``: also whether its loss is separable by sample, if there are two. The model is as before afterwards.
    Raises NotSeparable, BatchError, or ValueError for a loss that cannot be trained.
    """

    def run(part: Batch, record: Reads | None) -> Any:
        users, handed = form.from_batch(part)
        with lookups.using(FromTables(tables, part, handed, record)):
            return model(users)

    with undisturbed(model):
        total, count = losses.of(run(batch, reads), len(batch))
        if check:
            first = _detached(total, count)
            buffers = {name: value.clone() for name, value in model.named_buffers()}  # the first pass may make some
            again = _sums(losses, run(batch, None), len(batch))
            separable.require_stateless(first, again, changed_buffers(model, buffers))
            if len(batch) > 1:
                parts = [batch.select(index) for index in separable.halves(len(batch))]
                separable.require_equal_sums(first, [_sums(losses, run(part, None), len(part)) for part in parts])
    return Discovery(reads, count is not None)


def adopt_collections(model: nn.Module, lookups: Lookups) -> None:
    adopt(find_collections(model), lookups)


def release(model: nn.Module, tables: Mapping[str, Tensor] | None = None) -> None:
    """Give the collections of ``model`` their tables back, in place. ``tables``: new weights [rows, dim] by name."""
    for collection in adopted_collections(model).values():
        own = collection.adopted.tables
        for name, table in own.items():
            if tables is None:
                continue
            if table.weight.is_meta:
                table.weight = nn.Parameter(tables[name], requires_grad=table.weight.requires_grad)
            else:
                table.weight.data = tables[name]
        give_back(collection, own)


def copied(model: nn.Module, tables: Mapping[str, Tensor]) -> nn.Module:
    """A copy of an adopted ``model`` with collections of its own. What cannot be copied (locks, groups) is shared."""
    memo: dict[int, Any] = {}
    usual = vars(nn.Module())
    for module in model.modules():
        for value in (v for name, v in vars(module).items() if name not in usual):
            try:
                copy.deepcopy(value)
            except Exception:  # whatever an object raises that cannot be copied
                memo[id(value)] = value
    twin = copy.deepcopy(model, memo)
    for collection in adopted_collections(twin).values():
        own = copy.deepcopy(collection.adopted.tables)
        for name, table in own.items():
            table.weight = nn.Parameter(tables[name].clone(), requires_grad=table.weight.requires_grad)
        give_back(collection, own)
    return twin


def _sums(losses: Losses, output: Any, samples: int) -> separable.LossSums:
    return _detached(*losses.of(output, samples))


def _detached(total: Tensor, count: Tensor | None) -> separable.LossSums:
    return [total.detach().clone()] if count is None else [total.detach().clone(), count.detach().clone()]
