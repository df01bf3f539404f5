"""Finds models that cannot be trained in a frozen window, before they have trained wrongly.

Micro-batches are computed separately and their gradients are summed. That equals the whole batch only if a batch's
loss is a sum (or a mean) of terms that depend on one sample each. Batch norm mixes samples in its statistics. In-batch
negatives mix them in the loss, and so does a mean that divides by anything but the number of samples.

The loss is compared in the mode that trains, with dropout off, on the first batch and, at small cost, on later ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch

#: Relative difference of losses that rounding may explain, in float32 and in units of a coarser type's precision.
_TOLERANCE, _ROUNDINGS = 1e-4, 3
#: The same of gradients. What is below the last is taken for noise, relative to the gradient of all weights.
_GRADIENTS, _NOISE = 1e-3, 1e-5
#: Every batch up to this one is looked at again, then the 16th and the 32nd, and then each of ``_EVERY``.
_FIRST, _EVERY = 8, 64


@dataclass(frozen=True)
class Sums:
    """What a forward pass over some samples gave, detached.

    ``total``: the sum of their losses; ``count``: None unless the model returns Summed. ``precision``: of the coarsest
    type of numbers in the pass, 0 for float32. ``gradients``: of ``total``, by weight; None if not computed.
    """

    total: Tensor
    count: Tensor | None
    precision: float = 0.0
    gradients: Mapping[str, Tensor] | None = None

    @property
    def numbers(self) -> list[Tensor]:
        return [self.total] if self.count is None else [self.total, self.count]

    @property
    def tolerance(self) -> float:
        own = torch.finfo(self.total.dtype).eps
        return max(_TOLERANCE, _ROUNDINGS * own, self.precision / 4)


class NotSeparable(ValueError):
    """The model cannot be trained in micro-batches; the message says why and what to do."""


def require_no_batch_statistics(modules: Mapping[str, nn.Module]) -> None:
    """Raises NotSeparable for modules, by name, that compute statistics over the batch."""
    found = [f"{name} ({type(module).__name__})" for name, module in modules.items() if _mixes(module)]
    if found:
        raise NotSeparable(
            f"{', '.join(found[:3])}: batch norm computes its statistics over the batch, and those of "
            "micro-batches differ. Use LayerNorm or GroupNorm, put it into eval(), or train with micro_batches=1"
        )


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of ``model`` that compute statistics over the batch in train mode, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def _mixes(module: nn.Module) -> bool:
    return module.training or not getattr(module, "track_running_stats", True)


def halves(samples: int) -> list[Tensor]:
    """Every other sample from the first on, and the others, as indices."""
    return [torch.arange(start, samples, 2) for start in (0, 1)]


def thirds(samples: int) -> list[Tensor]:
    """The first third and the rest: a mean over some samples may be the mean of both halves, but hardly of these."""
    first = max(1, samples // 3)
    return [torch.arange(first), torch.arange(first, samples)]


def require_same_buffers(changed: Sequence[str]) -> None:
    if changed:
        raise NotSeparable(
            f"buffer '{changed[0]}' changes in the forward pass, so it would change once for each micro-batch "
            "and not once for each batch: train with micro_batches=1"
        )


def require_stateless(first: Sums, again: Sums) -> None:
    """Raises NotSeparable if a second pass over the same batch gives another loss."""
    for one, other in zip(first.numbers, again.numbers, strict=True):
        _require_finite(one, other)
        if abs(float(one) - float(other)) > 8 * max(_eps(one), first.precision / 32) * abs(float(one)):
            raise NotSeparable(
                f"two passes over the same batch give two losses ({float(one):.6g} and {float(other):.6g}, dropout "
                "off): the model keeps state between passes or draws random numbers, so micro-batches cannot be "
                "compared with their batch. Train with micro_batches=1, or, if every term of the loss depends on one "
                "sample, pass check=False"
            )


def require_equal_sums(whole: Sums, parts: Sequence[Sums], reduction: str) -> None:
    """Raises NotSeparable unless the loss of a batch is the sum of the losses of its ``parts``, and so its gradient."""
    if any((part.count is None) != (whole.count is None) for part in parts):
        raise NotSeparable("the model returns Summed for some samples and another loss for others; return one kind")
    for what, total, *pieces in zip(("loss", "count"), whole.numbers, *(part.numbers for part in parts), strict=False):
        if not math.isfinite(float(total)):  # it was finite in the first batch, so training diverges
            return
        values = [float(piece) for piece in pieces]
        size = max(abs(float(total)), sum(map(abs, values)))
        if not abs(float(total) - sum(values)) <= whole.tolerance * size:
            raise NotSeparable(
                f"the {what} of a batch ({float(total):.6g} summed over its samples) is not the sum over its parts "
                f"({sum(values):.6g}): {_causes(reduction)}"
            )
    if whole.gradients is not None and all(part.gradients is not None for part in parts):
        _require_equal_gradients(whole, parts, reduction)


def _require_equal_gradients(whole: Sums, parts: Sequence[Sums], reduction: str) -> None:
    assert whole.gradients is not None
    everything = math.sqrt(sum(float(g.double().square().sum()) for g in whole.gradients.values()))
    everything = max(everything, abs(float(whole.numbers[0])))  # if gradients cancel, only their rounding is left
    for name, gradient in whole.gradients.items():
        none = torch.zeros_like(gradient)  # a part may look up nothing in a table
        pieces = [part.gradients.get(name, none).double() for part in parts if part.gradients is not None]
        precision = max(whole.precision, torch.finfo(gradient.dtype).eps)
        gap = float((gradient.double() - torch.stack(pieces).sum(0)).norm())
        size = float(gradient.double().norm()) + sum(float(piece.norm()) for piece in pieces)
        if not gap <= max(_GRADIENTS, 4 * precision) * size + max(_NOISE, precision) * everything:
            raise NotSeparable(
                f"the gradient of {name} over a batch is not the sum over its parts, though the loss is: does a "
                f"detached term use other samples? {_causes(reduction)}"
            )


def _causes(reduction: str) -> str:
    other = {"mean": ", reduction='sum' for a sum", "sum": ", reduction='mean' for a mean over samples"}
    return (
        "does it use in-batch negatives, batch statistics, attention over the batch (batch_first=False), or a mean "
        f"over other things than samples? Return Summed(total, count) for such a mean{other.get(reduction, '')}; "
        "otherwise train with micro_batches=1"
    )


@dataclass
class Looks:
    """Which micro-batches are looked at again: one of each of the first 8 batches, of
    the 16th and the 32nd, and then of every 64th.

    Only batches of two or more samples count, since one sample cannot be split.
    """

    micro_batches: int
    _form: Any = None
    _batch: int = -1
    _part: int = 0
    _turn: int = 0
    _waiting: bool = False

    def is_due(self, part: Batch) -> bool:
        """Whether to look at ``part``, a micro-batch with samples."""
        if part.form is not self._form:
            samples = round(len(part) / part.share) if part.share else 0
            self._form, self._part, self._waiting = part.form, 0, samples > 1
            if self._waiting:
                self._batch += 1
                self._waiting = self._batch < _FIRST or self._batch in (16, 32) or self._batch % _EVERY == 0
                turn = self._batch if self._batch < _FIRST else self._batch // 16
                self._turn = turn % min(self.micro_batches, samples // 2)
        self._part += 1
        return self._waiting and self._part > self._turn

    def parts(self, samples: int) -> list[Tensor]:
        """How to cut the micro-batch that is due, another way each time."""
        return halves(samples) if self._batch % 2 else thirds(samples)

    def looked(self) -> None:
        """This batch has been looked at."""
        self._waiting = False


def _eps(value: Tensor) -> float:
    return float(torch.finfo(value.dtype if value.is_floating_point() else torch.float32).eps)


def _require_finite(*values: Tensor) -> None:
    for value in values:
        if not math.isfinite(float(value)):
            raise NotSeparable(
                f"the loss of the first batch is {float(value)}, so micro-batches cannot be compared with it: make "
                "the loss finite, or train with micro_batches=1"
            )
