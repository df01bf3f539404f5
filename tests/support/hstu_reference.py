"""Runs of HSTU's blocks that tests of other backbones share."""

from __future__ import annotations

import pytest
import torch

from nestpipe.models.hstu import HSTU, pad, padded_index

LONGEST = 9


def silu(x):
    return x / (1 + torch.exp(-x))


def run(hstu: HSTU, x: list[torch.Tensor], times: list[torch.Tensor]) -> list[torch.Tensor]:
    lengths = torch.tensor([len(row) for row in x], dtype=torch.int64)
    index = padded_index(lengths, max(1, int(lengths.max())), int(lengths.sum()))
    out = hstu(pad(torch.cat(x), index), pad(torch.cat(times), index))
    return [out[i, :n] for i, n in enumerate(lengths.tolist())]


@pytest.fixture(scope="module")
def hstu() -> HSTU:
    torch.manual_seed(0)
    model = HSTU(width=8, layers=2, heads=2, longest=LONGEST)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model
