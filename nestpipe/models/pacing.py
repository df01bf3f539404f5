"""A paced dense part: the real math, then a wait, as a stand-in for an accelerator.

Two CPU cores cannot compute and move data at the same time: the dense math itself slows down under
overlap. If the math of a paced dense part takes less than the given time, in forward or in backward,
the part sleeps for the rest, so that communication can proceed. Pacing is part of the model, so every
method pays the same. It is for CPU runs only: on CUDA the host's sleep would not block the stream.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.config import PACED_FORWARD
from nestpipe.data.batch import Batch, Jagged


def paced(dense: nn.Module, ms_per_batch: float, forward_share: float = PACED_FORWARD) -> nn.Module:
    """``dense``, changed so that a call ``dense(embedded, batch)`` takes at least its part of ``ms_per_batch`` ms.

    A (micro-)batch takes ``batch.share`` of it. The forward takes ``forward_share`` of that, counted from
    the arrival of its embeddings. The backward takes the rest, from the arrival of the loss gradient to
    the departure of the embedding gradients. The module is changed in place: parameter names and its
    other methods stay the same.
    """
    running = local()  # the current call of this thread; forward and its hooks share it

    def begin(_: nn.Module, arguments: tuple[Mapping[str, Any], Batch]) -> tuple[Mapping[str, Any], Batch]:
        embedded, batch = arguments
        seconds = ms_per_batch * 1e-3 * batch.share
        features = dict(embedded.items())  # an awaitable waits here, before the clock starts
        call = running.call = _Call(seconds * forward_share, seconds * (1 - forward_share))
        values = _Enter.apply(call, *(feature.values() for feature in features.values()))
        return {
            name: Jagged(value, feature.lengths())
            for (name, feature), value in zip(features.items(), values, strict=True)
        }, batch

    def end(_: nn.Module, __: Any, losses: Tensor) -> Tensor:
        call = running.call
        call.wait(call.forward_seconds)
        return _Leave.apply(call, losses)

    dense.register_forward_pre_hook(begin)
    dense.register_forward_hook(end)
    return dense


class _Call:
    """The clock of one forward and its backward."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds
        self.start()

    def start(self) -> None:
        self.began = time.perf_counter()

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, self.began + seconds - time.perf_counter()))


class _Enter(torch.autograd.Function):
    """Identity on the embeddings; in the backward, the last thing to run."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.wait(ctx.call.backward_seconds)
        return (None, *gradients)


class _Leave(torch.autograd.Function):
    """Identity on the losses; in the backward, the first thing to run."""

    @staticmethod
    def forward(ctx: Any, call: _Call, losses: Tensor) -> Tensor:
        ctx.call = call
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.call.start()
        return None, gradient
