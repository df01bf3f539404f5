"""HSTU: Hierarchical Sequential Transduction Units (Zhai et al., arXiv 2402.17152, section 3), plain PyTorch.

A block, with phi = SiLU and n = the longest history the model reads:

    U, V, Q, K = split(phi(linear(norm(X))))                      (1)
    A V        = phi(Q K^T + rab) / n  V, over earlier positions   (2)
    Y          = X + linear(norm(A V) * U)                         (3)

``rab`` is a bias by relative position and by the logarithm of the time between two items. Attention
is pointwise: no softmax, so a row's result does not depend on how far its batch is padded. Input norm
and residual are those of the authors' code. There is no dropout: results must not depend on the order of work.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TIME_BUCKETS = 32  # of log2 seconds: the last begins at 2**31 s, 68 years


def padded_index(lengths: Tensor, longest: int, total: int) -> Tensor:
    """int64 [samples, longest]: the index of each position in the flat values; ``total`` for padding."""
    steps = torch.arange(longest, device=lengths.device)
    starts = lengths.cumsum(0) - lengths
    return torch.where(steps < lengths[:, None], starts[:, None] + steps, total)


def pad(values: Tensor, index: Tensor) -> Tensor:
    """[samples, longest, ...] of flat ``values`` [total, ...], zero where ``index`` is total."""
    with_zero = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    return with_zero.index_select(0, index.flatten()).unflatten(0, index.shape)


def time_buckets(timestamps: Tensor) -> Tensor:
    """int64 [samples, n, n] from int64 seconds [samples, n]: floor(log2(1 + |t_i - t_j|)), at most 31."""
    apart = (timestamps[:, :, None] - timestamps[:, None, :]).abs() + 1
    return torch.frexp(apart.to(torch.float64))[1].long().sub_(1).clamp_(max=TIME_BUCKETS - 1)


def look_up(bias: Tensor, index: Tensor) -> Tensor:
    """``bias[index]`` of a vector, with a backward that is fast on a CPU or deterministic on a GPU."""
    if bias.is_cuda:
        return F.embedding(index, bias[:, None])[..., 0]
    return bias.gather(0, index.flatten()).view(index.shape)


class HSTUBlock(nn.Module):
    """One block: [samples, t, width] -> the same, causal."""

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads, self.longest = heads, longest
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.uvqk, self.out = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.position_bias = nn.Parameter(torch.empty(longest))
        self.time_bias = nn.Parameter(torch.empty(TIME_BUCKETS))
        nn.init.normal_(self.position_bias, std=0.02)
        nn.init.normal_(self.time_bias, std=0.02)

    def forward(self, x: Tensor, apart: Tensor, buckets: Tensor, visible: Tensor) -> Tensor:
        """``apart``: int64 [t, t], i - j for j <= i; ``buckets``: int64 [samples, t, t], time buckets.

        ``visible``: float32 [t, t], 1 / n if position i sees j (j <= i), else 0.
        """
        u, v, q, k = F.silu(self.uvqk(self.norm_in(x))).chunk(4, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        bias = look_up(self.time_bias, buckets) + look_up(self.position_bias, apart)
        weights = F.silu((q @ k.transpose(-1, -2)).add_(bias[:, None])).mul_(visible)
        gathered = (weights @ v).transpose(1, 2).flatten(2)
        return x + self.out(self.norm_out(gathered) * u)


class HSTU(nn.Module):
    """A stack of blocks over jagged histories.

    ``width`` elements per position (a multiple of ``heads``), ``layers`` blocks, histories of up to ``longest``.
    """

    def __init__(self, width: int, layers: int, heads: int, longest: int) -> None:
        super().__init__()
        self.longest = longest
        self.positions = nn.Parameter(torch.empty(longest, width))
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(HSTUBlock(width, heads, longest) for _ in range(layers))

    def forward(self, x: Tensor, timestamps: Tensor) -> Tensor:
        """[samples, t, width], padded at the end, and int64 seconds [samples, t] -> [samples, t, width].

        Position i has seen items 0..i, so real positions see no padding; the output at padded positions is meaningless.
        """
        t = x.shape[1]
        steps = torch.arange(t, device=x.device)
        apart = (steps[:, None] - steps[None, :]).clamp(min=0)
        visible = (steps[:, None] >= steps[None, :]).to(x.dtype) / self.longest
        buckets = time_buckets(timestamps)
        x = x + self.positions[:t]
        for block in self.blocks:
            x = block(x, apart, buckets, visible)
        return x
