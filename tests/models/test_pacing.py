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


class Clock:
    """Stands for the ``time`` module: time passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def ms(self, function) -> float:
        """How long ``function`` takes."""
        began = self.now
        function()
        return (self.now - began) * 1e3


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("nestpipe.models.pacing.time", clock)
    return clock


def test_losses_and_gradients_stay():
    results = []
    for dense in (Dense(), paced(Dense(), 1.0)):
        embedded, batch = inputs()
        losses = dense(embedded, batch)
        losses.sum().backward()
        results.append([losses.detach(), dense.linear.weight.grad, embedded["a"].flat.grad, embedded["b"].flat.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_forward_and_backward_take_their_parts_of_the_time(clock, parts):
    dense = paced(Dense(), 60.0)
    forward = backward = 0.0
    for m in range(parts):  # seven parts of four samples: three are empty, and free
        embedded, batch = inputs()
        part = batch.split(parts)[m]
        mine = {n: f.narrow(0, len(part)) for n, f in embedded.items()}
        losses = []
        forward += clock.ms(lambda mine=mine, part=part, losses=losses: losses.append(dense(mine, part)))
        backward += clock.ms(lambda losses=losses: losses[0].sum().backward())
    assert forward == pytest.approx(20) and backward == pytest.approx(40)


def test_time_between_forward_and_backward_does_not_count(clock):
    losses = paced(Dense(), 40.0, forward_share=0.25)(*inputs())
    clock.sleep(5.0)
    assert clock.ms(lambda: losses.sum().backward()) == pytest.approx(30)


def test_interleaved_calls_keep_their_own_clocks(clock):
    dense = paced(Dense(), 40.0, forward_share=0.5)
    pending = [dense(*inputs()) for _ in range(3)]
    for losses in reversed(pending):
        assert clock.ms(lambda losses=losses: losses.sum().backward()) == pytest.approx(20)


def test_the_math_counts_and_slow_math_is_not_slowed_further(clock):
    class Takes(Dense):
        def forward(self, embedded, batch):
            clock.sleep(0.012)
            return super().forward(embedded, batch)

    assert clock.ms(lambda: paced(Takes(), 60.0)(*inputs())) == pytest.approx(20)
    assert clock.ms(lambda: paced(Takes(), 30.0)(*inputs())) == pytest.approx(12)


def test_waiting_for_the_embeddings_does_not_count(clock):
    class Awaited(dict):
        """As torchrec's awaitable: the embeddings arrive when they are first asked for."""

        def items(self):
            clock.sleep(1.0)
            return super().items()

    embedded, batch = inputs()
    assert clock.ms(lambda: paced(Dense(), 60.0)(Awaited(embedded), batch)) == pytest.approx(1020)


def test_without_gradients_only_the_forward_is_paced(clock):
    with torch.no_grad():
        assert clock.ms(lambda: paced(Dense(), 60.0)(*inputs())) == pytest.approx(20)


def test_real_time_passes():
    began = time.perf_counter()
    paced(Dense(), 30.0)(*inputs()).sum().backward()
    assert time.perf_counter() - began >= 0.029
