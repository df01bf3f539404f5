"""The gradients of all dense weights: gathered into one vector per type, summed over ranks, and handed back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nestpipe.embedding.memory import Memory
from nestpipe.ranks.collectives import Exchange

#: The first entries of the facts, before a flag for each weight: the loss and the count.
_TOTALS = 2


class Gradients:
    """Between batches no weight has a gradient, so ``zero_grad`` of any kind does no harm. Backward makes them.

    ``begin`` comes before each backward pass, and ``add`` after it. Then come ``reduce``, ``finish``, the optimizer's
    step and ``end``.

    ``reduce`` copies them into flat vectors, one for each type, sums those over ranks in that type, as
    DistributedDataParallel does, and makes each gradient a view of them. A weight that no rank used keeps None, so an
    optimizer does not touch it. Which ranks used it is in a small vector of its own, with ``loss`` and ``count``: in a
    vector of gradients it would change how gloo cuts that, and so the order and the bits of its sums.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], memory: Memory) -> None:
        self._parameters = parameters
        self._memory = memory
        self._trained: list[bool] | None = None
        self._kept: dict[int, Tensor] = {}
        self._start()

    def _start(self) -> None:
        self._begun = False
        self._loss = self._count = 0.0
        self._drop()

    def begin(self) -> None:
        """Before the first backward pass of a batch, drop gradients that a caller made between steps."""
        if not self._begun:
            self._drop()
            self._begun = True

    def add(self, loss: float, count: float) -> None:
        """Add to what the next ``reduce`` sums over ranks."""
        self._loss += loss
        self._count += count

    def _lay_out(self, trained: list[bool]) -> None:
        """Vectors for the weights that need a gradient now; frozen ones may be freed between batches."""
        self._trained = trained
        self._flat: dict[torch.dtype, Tensor] = {}
        self._weights = [p for p, needed in zip(self._parameters, trained, strict=True) if needed]
        self._views: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(p.dtype for p in self._weights):
            own = [p for p in self._weights if p.dtype == dtype]
            flat = self._memory.zeros(sum(p.numel() for p in own), dtype=dtype)
            self._flat[dtype] = flat
            for parameter, piece in zip(own, flat.split([p.numel() for p in own]), strict=True):
                self._views[id(parameter)] = piece.view_as(parameter)
        self._facts = self._memory.zeros(_TOTALS + len(self._weights), dtype=torch.float64)

    def reduce(self, exchange: Exchange) -> tuple[float, float]:
        """Sum over ranks. Returns the sums of the losses and counts."""
        self.begin()  # for a rank without samples
        trained = [p.requires_grad for p in self._parameters]
        if trained != self._trained:
            self._lay_out(trained)
        used = [p.grad is not None for p in self._weights]
        with torch.no_grad():
            for parameter, is_used in zip(self._weights, used, strict=True):
                if not is_used:
                    self._views[id(parameter)].zero_()
            mine = [p for p, is_used in zip(self._weights, used, strict=True) if is_used]
            if mine:
                targets = [self._views[id(p)] for p in mine]
                torch._foreach_copy_(targets, [_dense(p.grad) for p in mine])
            self._facts.copy_(torch.tensor([self._loss, self._count, *map(float, used)], dtype=torch.float64))
            exchange.all_reduce_each([*self._flat.values(), self._facts])
        loss, count, *flags = self._facts.tolist()
        for parameter, flag in zip(self._weights, flags, strict=True):
            parameter.grad = self._views[id(parameter)] if flag else None
        return loss, count

    def finish(self, factor: float) -> None:
        """Multiply the sums by ``factor``, and add what earlier batches have left."""
        if factor != 1.0:
            for flat in self._flat.values():
                flat.mul_(factor)
        for parameter in self._parameters:
            kept = self._kept.get(id(parameter))
            if kept is not None:
                parameter.grad = kept if parameter.grad is None else parameter.grad.add_(kept)

    def end(self) -> None:
        """After the optimizer's ``zero_grad``: what that left is added to the next batch's, as autograd would do."""
        self._kept = {id(p): p.grad.clone() for p in self._parameters if p.grad is not None}
        self._start()

    def clear(self) -> None:
        """Drop all gradients and sums."""
        self._kept = {}
        self._start()

    def _drop(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient
