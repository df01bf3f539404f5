"""Runs of HSTU's blocks that tests of other backbones share."""

from __future__ import annotations

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
