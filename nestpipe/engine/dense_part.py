"""The model without its embedding tables: what F, B, A and O work on."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.received import ReceivedEmbeddings
from nestpipe.engine.gradients import Gradients
from nestpipe.ranks.collectives import Exchange
from nestpipe.trainer import DenseOptimizer, ModelSpec


@dataclass(frozen=True)
class BatchTotals:
    """Sums over all ranks: of their shares of the loss, and of the counts of a model that divides by them."""

    loss: float
    total_count: float


class DensePart:
    """The model, the embedding module injected into it, its optimizer, and the gradients of all its weights.

    Weights and buffers start as those of rank 0. Collective. ``exchange``: joins all ranks. Raises ValueError for an
    optimizer whose ``step`` needs a closure, for weights that have no values yet, and for models that differ by rank.
    """

    def __init__(self, spec: ModelSpec, dense_optimizer: DenseOptimizer, memory: Memory, exchange: Exchange):
        self._embeddings = ReceivedEmbeddings(spec.tables)
        self._model = spec.build(self._embeddings)
        self._summed = spec.summed
        self._counted = spec.divide_by == "count"
        self._exchange = exchange
        for name, parameter in self._model.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ValueError(f"weight '{name}' has no values yet: run its lazy module once before training")
        _start_as_on_rank_0(self._model, exchange)
        parameters = list(self._model.parameters())
        self._optimizer = dense_optimizer(parameters) if parameters else None
        _require_no_closure(self._optimizer)
        self._gradients = Gradients(parameters, memory)
        self._clear = getattr(self._optimizer, "zero_grad", self._gradients.clear)

    def losses(self, part: Batch, received: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor | None]:
        """The summed losses of a micro-batch, a scalar, and their count if the model returns one.

        ``ReceivedEmbeddings.set`` describes the arguments. Raises ValueError if the model does not return one loss per
        sample, or their sum if ``summed`` is set, or (total, count) if the losses are divided by a count.
        """
        self._embeddings.set(received, inverse, part)
        losses = self._model(part)
        if self._counted:
            return _total_and_count(losses)
        if not isinstance(losses, Tensor):
            raise ValueError(f"the model returned a {type(losses).__name__} instead of a tensor of losses")
        if losses.shape != (() if self._summed else (len(part),)):
            raise ValueError(
                f"the model returned losses of shape {tuple(losses.shape)} for {len(part)} samples: return one per "
                f"sample, shape ({len(part)},), not their mean (reduction='none')"
            )
        return losses.sum(), None

    def begin(self) -> None:
        """Before each backward pass. The first one of a batch drops gradients that others have left."""
        self._gradients.begin()

    def add(self, loss: float, count: float) -> None:
        """Add a micro-batch's share of the loss, and its count, to what the next ``reduce`` sums over ranks."""
        self._gradients.add(loss, count)

    def reduce(self) -> BatchTotals:
        """Sum the gradients over ranks, and what ``add`` was given. Collective."""
        return BatchTotals(*self._gradients.reduce(self._exchange))

    def step(self, factor: float = 1.0) -> None:
        """Apply the gradients, times ``factor``, and drop those that the optimizer's ``zero_grad`` does not keep."""
        self._gradients.finish(factor)
        if self._optimizer is not None:
            self._optimizer.step()
            self._clear()
        self._gradients.end()

    def weights(self) -> dict[str, Tensor]:
        """The dense weights by name; live tensors."""
        return {name: p.detach() for name, p in self._model.named_parameters()}

    def optimizer_state(self) -> Any:
        """The dense optimizer's ``state_dict``, empty without dense weights; live tensors."""
        return {} if self._optimizer is None else self._optimizer.state_dict()

    def load(self, weights: Mapping[str, Tensor], optimizer_state: Any) -> None:
        """Load copies of both. A partly summed gradient is dropped."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])
        self._gradients.clear()
        if self._optimizer is not None:
            # A copy: an optimizer keeps the tensors that it is given, and would then change the caller's.
            self._optimizer.load_state_dict(deepcopy(optimizer_state))


def _start_as_on_rank_0(model: nn.Module, exchange: Exchange) -> None:
    """As DistributedDataParallel does, so that ranks need no common seed."""
    tensors: Sequence[Tensor] = [*(p.detach() for p in model.parameters()), *(b for b in model.buffers())]
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if exchange.world_size == 1:
        return
    _require_same_model(model, exchange)
    if not tensors:
        return
    flat = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    exchange.broadcast(flat)
    with torch.no_grad():
        for tensor, piece in zip(tensors, flat.split([t.numel() * t.element_size() for t in tensors]), strict=True):
            # A copy, because a slice of bytes need not be aligned for its type.
            tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def _require_same_model(model: nn.Module, exchange: Exchange) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if tensor.layout != torch.strided:
            raise ValueError(
                f"'{name}' is a sparse tensor, which cannot be sent to other ranks: keep its indices and values instead"
            )
    text = repr([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named])
    digest = torch.tensor([zlib.crc32(text.encode())], device=named[0][1].device if named else None)
    digests = exchange.all_gather(digest).flatten().tolist()
    other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise ValueError(
            f"the model of rank {other[0]} has other weights or buffers than that of rank 0 (names, shapes or types): "
            "build the same model on all ranks"
        )


def _total_and_count(losses: Any) -> tuple[Tensor, Tensor]:
    if (
        isinstance(losses, tuple | list)
        and len(losses) == 2
        and all(isinstance(x, Tensor) and not x.dim() for x in losses)
    ):
        total, count = losses
        if count.requires_grad:
            raise ValueError("the count that the losses are divided by depends on weights: detach it")
        return total, count
    raise ValueError("a model whose losses are divided by a count returns (sum of losses, count), two scalar tensors")


def _require_no_closure(optimizer: Any) -> None:
    step = getattr(optimizer, "step", None)
    if step is None:
        return
    needed = [p for p in inspect.signature(step).parameters.values() if p.default is p.empty and p.name == "closure"]
    if needed or isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"the dense optimizer {type(optimizer).__name__} evaluates the model again in its step, which a pipeline "
            "cannot do: use one whose step() needs no closure, such as torch.optim.AdamW"
        )
