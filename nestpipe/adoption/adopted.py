"""A user's model as the engine runs it: ``Batch`` in, the sum of its losses out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
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
from nestpipe.adoption.undisturbed import changed_buffers, copied_buffers, undisturbed
from nestpipe.data.batch import Batch

#: How many sums the gradients of a table's rows are compared in.
_BINS = 64


class AdoptedModel(nn.Module):
    """``model``, whose collections are adopted, with rows from ``embeddings`` (the engine's).

    ``outputs``: of the micro-batches since the last ``clear``, the numbers of their samples and what the model
    returned next to the loss. ``looks``: whether to look again at later batches, see ``separable``.
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
        self._batch_norms = separable.batch_norms(model) if micro_batches > 1 else {}
        self._looks = separable.Looks(micro_batches) if looks else None
        self.outputs: list[tuple[Tensor, Any]] = []

    def forward(self, part: Batch) -> Tensor | tuple[Tensor, Tensor]:
        if self._batch_norms:
            separable.require_no_batch_statistics(self._batch_norms)
        batch, handed = self._form.from_batch(part)
        rows = FromEngine(self._embeddings({}), part, handed)
        with self._lookups.using(rows):
            output = self.model(batch)
        total, count = self._losses.of(output, len(part))
        if (count is not None) != self._summed:
            raise ValueError("the model returns Summed for some batches and another loss for others; return one kind")
        self.outputs.append((part.sample_ids, second_part(output)))
        if self._looks is not None:
            self._look_again(self._looks, part, rows)
        return total if count is None else (total, count)

    def _look_again(self, looks: separable.Looks, part: Batch, rows: FromEngine) -> None:
        """Compare the losses of ``part`` and of two parts of it, with the rows that it got."""
        if not looks.is_due(part):
            return
        looks.looked()
        with undisturbed(self.model) as pass_:
            buffers = copied_buffers(self.model)

            def sums(index: Tensor) -> separable.Sums:
                some = part.select(index)
                batch, handed = self._form.from_batch(some)
                with self._lookups.using(rows.select(some, handed, index)):
                    total, count = self._losses.of(self.model(batch), len(some))
                return _sums(total, count, pass_.precision)

            whole = sums(torch.arange(len(part)))
            parts = _of_parts(sums, looks.parts(len(part)))
            separable.require_same_buffers(changed_buffers(self.model, buffers))
        if parts:
            separable.require_equal_sums(whole, parts, self._losses.reduction)


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
    check: int,
) -> Discovery:
    """Run the adopted ``model`` on ``batch`` with rows of ``tables``, and record in ``reads`` what it looks up.

    ``check``: also whether its loss is separable by sample, if there are two: into as many micro-batches, and other
    parts; 0 for no check. The model is as before afterwards.
    Raises NotSeparable, BatchError, or ValueError for a loss that cannot be trained.
    """

    def sums(part: Batch, record: Reads | None, with_gradients: bool) -> separable.Sums:
        users, handed = form.from_batch(part)
        rows = FromTables(tables, part, handed, record)
        with lookups.using(rows):
            total, count = losses.of(model(users), len(part))
            # A part may have nothing to learn from. A model with only frozen weights cannot be trained by any loop.
            if not total.requires_grad and part is batch:
                raise ValueError("the loss does not depend on any weight that is trained: is it detached?")
            gradients = None
            if with_gradients:
                gradients = _gradients(model, rows, total) if total.requires_grad else {}
        return _sums(total, count, pass_.precision, gradients)

    with undisturbed(model) as pass_:
        first = sums(batch, reads, check > 0)
        if check:
            buffers = copied_buffers(model)  # the first pass may make some
            again = sums(batch, None, False)
            separable.require_same_buffers(changed_buffers(model, buffers))
            separable.require_stateless(first, again)
            for cut in (separable.halves(len(batch)), separable.thirds(len(batch)), batch.places(check)):
                parts = _of_parts(lambda index: sums(batch.select(index), None, True), cut)
                separable.require_same_buffers(changed_buffers(model, buffers))
                if parts:
                    separable.require_equal_sums(first, parts, losses.reduction)
    return Discovery(reads, first.count is not None)


def _of_parts(sums: Callable[[Tensor], separable.Sums], parts: Sequence[Tensor]) -> list[separable.Sums]:
    """What ``sums`` gives for ``parts``; nothing if there is only one, or if the model cannot take a single sample."""
    parts = [index for index in parts if len(index)]
    if len(parts) < 2:
        return []
    try:
        return [sums(index) for index in parts]
    except Exception:  # whatever a user's model raises
        if min(map(len, parts)) > 1:
            raise
        return []


def _gradients(model: nn.Module, rows: FromTables, total: Tensor) -> dict[str, Tensor] | None:
    """Of ``total``, by weight; of a table's rows, summed over ids equal modulo ``_BINS``. None if it has none."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    looked_up = [one for one in rows.handed_out if one[2].requires_grad]
    leaves = [*weights.values(), *(one[2] for one in looked_up)]
    try:
        found = torch.autograd.grad(total, leaves, allow_unused=True)
    except RuntimeError:  # some functions, such as reentrant checkpoints, have no torch.autograd.grad
        return None
    dense = [torch.zeros_like(x) if g is None else g.to_dense() for x, g in zip(leaves, found, strict=True)]
    gradients = dict(zip((f"weight '{name}'" for name in weights), dense, strict=False))
    for (table, ids, values), gradient in zip(looked_up, dense[len(weights) :], strict=True):
        name = f"table '{table}'"
        bins = gradients.setdefault(name, values.new_zeros(_BINS, values.shape[1]))
        bins.index_add_(0, ids % _BINS, gradient)
    return gradients


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
    """A copy of an adopted ``model`` with collections of its own, whose weights are ``tables``.

    What cannot be copied (locks, groups) is shared. A model that is not adopted any more is copied as it is.
    """
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


def _sums(
    total: Tensor, count: Tensor | None, precision: float, gradients: Mapping[str, Tensor] | None = None
) -> separable.Sums:
    counted = None if count is None else count.detach().clone()
    return separable.Sums(total.detach().clone(), counted, precision, gradients)
