"""HSTU against a slow reference, one sample and one position at a time, from the paper's formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from nestpipe.models.hstu import HSTU, look_up, pad, padded_index, time_buckets
from tests.support.hstu_reference import LONGEST, run, silu


@pytest.fixture(scope="module")
def hstu() -> HSTU:
    torch.manual_seed(0)
    model = HSTU(width=8, layers=2, heads=2, longest=LONGEST)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def norm(x, layer):
    mean, variance = x.mean(), ((x - x.mean()) ** 2).mean()
    return (x - mean) / torch.sqrt(variance + layer.eps) * layer.weight + layer.bias


def reference(hstu: HSTU, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """arXiv 2402.17152, equations 1-3, for one history [t, width]; residual and input norm as in its code."""
    x = [row + hstu.positions[i] for i, row in enumerate(x)]
    for block in hstu.blocks:
        parts = [silu(block.uvqk.weight @ norm(row, block.norm_in) + block.uvqk.bias).chunk(4) for row in x]
        rows = []
        for i in range(len(x)):
            heads = []
            for h in range(block.heads):
                size = len(x[0]) // block.heads
                mine = slice(h * size, (h + 1) * size)
                total = torch.zeros(size)
                for j in range(i + 1):
                    bucket = min(int(math.log2(1 + abs(int(times[i] - times[j])))), 31)
                    bias = block.position_bias[i - j] + block.time_bias[bucket]
                    weight = silu(parts[i][2][mine] @ parts[j][3][mine] + bias) / LONGEST
                    total = total + weight * parts[j][1][mine]
                heads.append(total)
            gated = norm(torch.cat(heads), block.norm_out) * parts[i][0]
            rows.append(x[i] + block.out.weight @ gated + block.out.bias)
        x = rows
    return torch.stack(x)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, LONGEST), min_size=1, max_size=4), st.integers(0, 99))
def test_equals_the_reference_sample_by_sample(hstu, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(n, 8, generator=generator) for n in lengths]
    times = [torch.randint(0, 10**9, (n,), generator=generator).sort().values for n in lengths]
    for got, one, when in zip(run(hstu, x, times), x, times, strict=True):
        if len(one):
            torch.testing.assert_close(got, reference(hstu, one, when), rtol=1e-4, atol=1e-5)


def test_is_causal(hstu):
    x, times = torch.randn(6, 8), torch.arange(6) * 1000
    changed = x.clone()
    changed[4:] = 5.0
    later = torch.where(torch.arange(6) >= 4, times + 10**6, times)
    torch.testing.assert_close(run(hstu, [x], [times])[0][:4], run(hstu, [changed], [later])[0][:4])


def test_gradients_do_not_depend_on_company(hstu):
    long, short = torch.randn(9, 8), torch.randn(3, 8)
    times = [torch.arange(9) * 60, torch.arange(3) * 7]
    alone = short.clone().requires_grad_()
    run(hstu, [alone], times[1:])[0].sum().backward()
    together = short.clone().requires_grad_()
    run(hstu, [long, together], times)[1].sum().backward()
    torch.testing.assert_close(alone.grad, together.grad)


def test_time_buckets_are_the_floor_of_the_logarithm():
    apart = torch.tensor([0, 1, 2, 3, 6, 7, 2**20 - 2, 2**20 - 1, 2**40])
    buckets = time_buckets(torch.stack([torch.zeros_like(apart), apart], 1))[:, 1, 0]
    assert buckets.tolist() == [0, 1, 1, 2, 2, 3, 19, 20, 31]


def test_look_up_has_the_gradient_of_indexing():
    bias, index = torch.randn(5, requires_grad=True), torch.randint(0, 5, (3, 4))
    weights = torch.randn(3, 4)
    (wanted,) = torch.autograd.grad((bias[index] * weights).sum(), bias)
    (got,) = torch.autograd.grad((look_up(bias, index) * weights).sum(), bias)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(look_up(bias, index), bias[index])


def test_pad_and_its_backward():
    values = torch.randn(3, 2, requires_grad=True)
    index = padded_index(torch.tensor([2, 0, 1]), 3, 3)
    assert index.tolist() == [[0, 1, 3], [3, 3, 3], [2, 3, 3]]
    padded = pad(values, index)
    assert torch.equal(padded[0, :2], values[:2]) and not padded[1].any()
    padded.sum().backward()
    assert torch.equal(values.grad, torch.ones(3, 2))


def test_silu_here_is_torchs():
    x = torch.randn(10)
    torch.testing.assert_close(silu(x), F.silu(x))
