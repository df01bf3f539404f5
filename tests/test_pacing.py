"""Paced dense: the same numbers, later."""

import time

import pytest
import torch
from torch import nn

from nestpipe.data import Batch, Jagged
from nestpipe.models.pacing import paced


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)

    def forward(self, embedded, batch):
        return self.linear(embedded["a"].values()).sum(1) + embedded["b"].values().sum(1)


def inputs(samples: int = 4) -> tuple[dict[str, Jagged], Batch]:
    ones = torch.ones(samples, dtype=torch.int64)
    generator = torch.Generator().manual_seed(1)
    embedded = {n: Jagged(torch.rand(samples, 3, generator=generator).requires_grad_(), ones) for n in "ab"}
    return embedded, Batch(sparse={}, sample_ids=torch.arange(samples), extra={})


def timed(function) -> float:
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1e3


def test_losses_and_gradients_stay():
    results = []
    for dense in (Dense(), paced(Dense(), 1.0)):
        embedded, batch = inputs()
        losses = dense(embedded, batch)
        losses.sum().backward()
        results.append([losses.detach(), dense.linear.weight.grad, embedded["a"].flat.grad, embedded["b"].flat.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("parts", [1, 4])
def test_forward_and_backward_take_their_parts_of_the_time(parts):
    dense = paced(Dense(), 60.0, forward_share=0.5)
    forward = backward = 0.0
    for m in range(parts):
        embedded, batch = inputs()
        part = batch.split(parts)[m]
        mine = {n: f.narrow(0, len(part)) for n, f in embedded.items()}
        losses = []
        forward += timed(lambda mine=mine, part=part, losses=losses: losses.append(dense(mine, part)))
        backward += timed(lambda losses=losses: losses[0].sum().backward())
    assert 29 <= forward < 60 and 29 <= backward < 60


def test_time_between_forward_and_backward_does_not_count():
    dense = paced(Dense(), 40.0, forward_share=0.25)
    embedded, batch = inputs()
    losses = dense(embedded, batch)
    time.sleep(0.05)
    assert timed(lambda: losses.sum().backward()) >= 29


def test_interleaved_calls_keep_their_own_clocks():
    dense = paced(Dense(), 40.0, forward_share=0.5)
    pending = [dense(*inputs()) for _ in range(3)]
    for losses in reversed(pending):
        assert 19 <= timed(lambda losses=losses: losses.sum().backward()) < 40


def test_slow_math_is_not_slowed_further():
    class Slow(Dense):
        def forward(self, embedded, batch):
            time.sleep(0.04)
            return super().forward(embedded, batch)

    assert timed(lambda: paced(Slow(), 30.0)(*inputs())) < 60


def test_an_empty_part_and_no_gradients_do_not_wait():
    dense = paced(Dense(), 500.0)
    embedded, batch = inputs()
    empty = batch.narrow(0, 0)
    assert timed(lambda: dense({n: f.narrow(0, 0) for n, f in embedded.items()}, empty).sum().backward()) < 200
    with torch.no_grad():
        assert dense({n: f.narrow(0, 0) for n, f in embedded.items()}, empty).shape == (0,)
