"""What a model returns as its loss, and what the sum of it is divided by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nestpipe.trainer import DivideBy

REDUCTIONS = ("mean", "sum", "none")
AVERAGES = ("samples", "ranks")


@dataclass(frozen=True)
class Summed:
    """A loss that is ``total / count``, with the sum of both over all micro-batches and ranks.

    Return it for a mean over anything but samples: over tokens, over samples that have a label, over weights. Both
    are scalars, of this part of the batch only. ``count`` does not depend on weights.
    """

    total: Tensor
    count: Tensor | float


@dataclass(frozen=True)
class Losses:
    """``reduction``: what the model's loss is over the samples that it is given: their mean, their sum, or each.

    ``average``: ``samples`` gives every sample of the global batch the same weight; ``ranks`` takes the mean of the
    ranks' means, as DistributedDataParallel does.
    """

    reduction: str = "mean"
    average: str = "samples"

    def divide_by(self, summed: bool) -> DivideBy:
        """What the engine divides the sum of losses by; ``summed``: the model returns Summed."""
        if summed:
            return "count"
        if self.reduction == "sum":
            return "ranks"
        return "samples" if self.average == "samples" else "rank_samples"

    def of(self, output: Any, samples: int) -> tuple[Tensor, Tensor | None]:
        """The sum of the losses of ``samples`` samples, a scalar, and its count if the model returns Summed.

        Raises ValueError if ``output`` has no such loss.
        """
        is_pair = isinstance(output, tuple | list) and len(output) > 0
        loss = output[0] if is_pair else output
        if isinstance(loss, Summed):
            if self.reduction != "mean" or self.average != "samples":
                raise ValueError(
                    "the model returns Summed, which says itself what the loss is divided by: leave out reduction= and "
                    "average="
                )
            return _summed(loss)
        if not isinstance(loss, Tensor):
            found = f"{'a pair whose first part is a ' if is_pair else ''}{type(loss).__name__}"
            raise ValueError(f"the model must return its loss, or (loss, anything); it returned {found}")
        if loss.is_complex() or not loss.is_floating_point():
            raise ValueError(f"the model returned a loss of type {loss.dtype}: a loss is a floating-point number")
        if self.reduction == "none":
            if loss.shape not in ((samples,), (samples, 1)):
                raise ValueError(
                    f"the model returned losses of shape {tuple(loss.shape)} for {samples} samples; with "
                    f"reduction='none' it returns one for each sample, shape ({samples},)"
                )
            return loss.sum(), None
        if loss.numel() != 1:
            raise ValueError(
                f"the model returned {loss.numel()} losses, but reduction='{self.reduction}' takes one: if they are "
                "one for each sample, pass reduction='none'; if they are predictions, return (loss, predictions)"
            )
        one = loss.reshape(())
        return (one * samples if self.reduction == "mean" else one), None


def _summed(loss: Summed) -> tuple[Tensor, Tensor]:
    if not isinstance(loss.total, Tensor) or loss.total.numel() != 1 or not loss.total.is_floating_point():
        raise ValueError("Summed takes a total that is a floating-point tensor with one value: sum the losses first")
    try:
        count = torch.as_tensor(loss.count)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"Summed takes a count that is one number, not a {type(loss.count).__name__}") from None
    if count.numel() != 1 or count.is_complex():
        raise ValueError(f"Summed takes a count that is one number; it got shape {tuple(count.shape)}: sum it first")
    if count.requires_grad:
        raise ValueError("Summed takes a count that does not depend on weights: detach it if it is to be a constant")
    return loss.total.reshape(()), count.reshape(())
