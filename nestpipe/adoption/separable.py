"""Finds models that cannot be trained in a frozen window, before they have trained wrongly.

Micro-batches are computed separately and their gradients are summed. That equals the whole batch only if a batch's
loss is a sum (or a mean) of terms that depend on one sample each. Batch norm mixes samples in its statistics. In-batch
negatives mix them in the loss, and so does a mean that divides by anything but the number of samples.

The loss is compared in the mode that trains, with dropout off, on the first batch and, at small cost, on later ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch, Jagged

#: Relative difference of losses that rounding may explain: of float32 losses, and in units of their type's precision.
_TOLERANCE, _ROUNDINGS = 1e-4, 16
#: Every batch up to this one is looked at again, and then each of ``_EVERY``.
_FIRST, _EVERY = 8, 16

#: The sum of the loss over the samples of a batch, and its count if the model returns Summed.
LossSums = Sequence[Tensor]


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


def halves(samples: int) -> list[Tensor]:
    """Every other sample from the first on, and the others, as indices."""
    return [torch.arange(start, samples, 2) for start in (0, 1)]


def require_stateless(first: LossSums, again: LossSums, changed_buffers: Sequence[str]) -> None:
    """Raises NotSeparable if a second pass over the same batch gives another loss, or a pass changes buffers."""
    if changed_buffers:
        raise NotSeparable(
            f"buffer '{changed_buffers[0]}' changes in the forward pass, so it would change once for each micro-batch "
            "and not once for each batch: train with micro_batches=1"
        )
    for one, other in zip(first, again, strict=True):
        _require_finite(one)
        if abs(float(one) - float(other)) > 8 * torch.finfo(_precision(one)).eps * abs(float(one)):
            raise NotSeparable(
                f"two passes over the same batch give two losses ({float(one):.6g} and {float(other):.6g}, dropout "
                "off): the model keeps state between passes or draws random numbers, so micro-batches cannot be "
                "compared with their batch. Train with micro_batches=1, or pass check=False if no term mixes samples"
            )


def require_equal_sums(whole: LossSums, parts: Sequence[LossSums]) -> None:
    """Raises NotSeparable unless the loss of a batch is the sum of the losses of its ``parts``."""
    for n, total in enumerate(whole):
        pieces = [float(part[n]) for part in parts]
        if not math.isfinite(float(total)):  # it was finite in the first batch, so training diverges
            return
        tolerance = max(_TOLERANCE, _ROUNDINGS * torch.finfo(_precision(total)).eps)
        if not abs(float(total) - sum(pieces)) <= tolerance * max(abs(float(total)) + sum(map(abs, pieces)), 1e-6) / 2:
            what = "loss" if n == 0 else "count"
            raise NotSeparable(
                f"the {what} of a batch ({float(total):.6g}) is not the sum over its parts ({sum(pieces):.6g}): "
                "does it use in-batch negatives, attention over the batch (batch_first=False), or a mean over other "
                "things than samples? Return Summed(total, count) for such a mean, reduction='sum' for a sum; "
                "otherwise train with micro_batches=1"
            )


def is_due(call: int, micro_batches: int) -> bool:
    """Whether the ``call``-th micro-batch is looked at again: one of a batch, another one each time."""
    batch, micro = divmod(call, micro_batches)
    if batch < _FIRST:
        return micro == batch % micro_batches
    return batch % _EVERY == 0 and micro == batch // _EVERY % micro_batches


def joined(one: Batch, other: Batch) -> Batch:
    """The samples of both; they are parts of one batch."""
    extra = {name: _joined(value, other.extra[name]) for name, value in one.extra.items()}
    sparse = {name: _joined(value, other.sparse[name]) for name, value in one.sparse.items()}
    return Batch(sparse, torch.cat([one.sample_ids, other.sample_ids]), extra, reads=one.reads, form=one.form)


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, Tensor):
        return torch.cat([one, other])
    return Jagged(torch.cat([one.flat, other.flat]), torch.cat([one.counts, other.counts]))


def _precision(value: Tensor) -> torch.dtype:
    return value.dtype if value.is_floating_point() else torch.float32


def _require_finite(value: Tensor) -> None:
    if not math.isfinite(float(value)):
        raise NotSeparable(
            f"the loss of the first batch is {float(value)}, so micro-batches cannot be compared with their "
            "batch: make the loss finite, train with micro_batches=1, or pass check=False if no term mixes samples"
        )
