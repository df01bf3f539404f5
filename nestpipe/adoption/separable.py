"""Finds models that cannot be trained in a frozen window, before the first step.

Micro-batches are computed separately and their gradients are summed. That equals the whole batch only if a batch's
loss is a sum (or a mean) of terms that depend on one sample each. Batch norm mixes samples in its statistics. In-batch
negatives mix them in the loss, and so does a mean that divides by anything but the number of samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch

#: Relative difference of losses that rounding may explain.
_TOLERANCE = 1e-4


class NotSeparable(ValueError):
    """The model cannot be trained in micro-batches; the message says why and what to do."""


def require_no_batch_statistics(model: nn.Module) -> None:
    """Raises NotSeparable for modules that compute statistics over the batch."""
    found = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or not module.track_running_stats)
    ]
    if found:
        raise NotSeparable(
            f"{', '.join(found[:3])}: batch norm computes its statistics over the batch, and those of "
            "micro-batches differ. Use LayerNorm or GroupNorm, put it into eval(), or train with micro_batches=1"
        )


def require_separable_loss(loss_sum: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: Batch) -> None:
    """Raises NotSeparable unless the loss of ``batch`` is the sum of the losses of two parts of it.

    ``loss_sum(model, batch)``: the sum over samples of the loss. The check runs on a copy in eval mode (dropout off),
    so that neither buffers nor random numbers of the model change. A difference that rounding explains is accepted.
    """
    if len(batch) < 2:
        return
    model = copy.deepcopy(model).eval()
    parts = [batch.select(torch.arange(start, len(batch), 2)) for start in (0, 1)]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        whole, halves = (float(sum(loss_sum(model, b) for b in batches)) for batches in ([batch], parts))
    if abs(whole - halves) > _TOLERANCE * max(abs(whole), 1e-6):
        raise NotSeparable(
            f"the loss of a batch ({whole:.6g}) is not the sum over its micro-batches ({halves:.6g}): does it use "
            "in-batch negatives, or a mean over something else than samples? Pass reduction='sum' or 'none' if "
            "the loss is not a mean; otherwise train with micro_batches=1"
        )
