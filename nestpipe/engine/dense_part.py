"""The model without its embedding tables: what F, B, A and O work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.received import ReceivedEmbeddings
from nestpipe.trainer import DenseOptimizer, ModelSpec


class DensePart:
    """The model, the embedding module injected into it, its optimizer, and one flat gradient of all its weights.

    ``gradient``: one float32 vector, of which all dense gradients are views. So one AllReduce is enough, and
    backward adds in place.
    """

    def __init__(self, spec: ModelSpec, dense_optimizer: DenseOptimizer, memory: Memory):
        self._embeddings = ReceivedEmbeddings(spec.tables)
        self._model = spec.build(self._embeddings)
        self._summed = spec.summed
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        self.gradient = _flat_gradient(parameters, memory)
        self._optimizer = dense_optimizer(parameters)

    def loss_sum(self, part: Batch, received: Tensor, inverse: Tensor) -> Tensor:
        """The summed losses of a micro-batch, a scalar. ``ReceivedEmbeddings.set`` describes the arguments.

        Raises ValueError if the model does not return one loss per sample, or their sum if ``summed`` is set.
        """
        self._embeddings.set(received, inverse, part)
        losses = self._model(part)
        if losses.shape != (() if self._summed else (len(part),)):
            raise ValueError(
                f"the model returned losses of shape {tuple(losses.shape)} for {len(part)} samples: return one per "
                f"sample, shape ({len(part)},), not their mean (reduction='none')"
            )
        return losses.sum()

    def step(self) -> None:
        """Apply the gradient and set it to zero."""
        self._optimizer.step()
        self.gradient.zero_()

    def weights(self) -> dict[str, Tensor]:
        """The dense weights by name; live tensors."""
        return {name: p.detach() for name, p in self._model.named_parameters()}

    def optimizer_state(self) -> Any:
        """The dense optimizer's ``state_dict``; live tensors."""
        return self._optimizer.state_dict()

    def load(self, weights: Mapping[str, Tensor], optimizer_state: Any) -> None:
        """Load copies of both. A partly summed gradient is dropped."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])
        self.gradient.zero_()
        # A copy: an optimizer keeps the tensors that it is given, and would then change the caller's.
        self._optimizer.load_state_dict(deepcopy(optimizer_state))


def _flat_gradient(parameters: Sequence[torch.nn.Parameter], memory: Memory) -> Tensor:
    flat = memory.zeros(sum(p.numel() for p in parameters))
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter)
    return flat
