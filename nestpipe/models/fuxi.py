"""FuXi (FuXi-alpha: Ye et al., arXiv 2502.03036, section 3), backbone of the paper's GPU experiments, plain PyTorch.

A block, with phi = SiLU, RMSN = root-mean-square norm and n = the longest history the model reads:

    X'         = RMSN(X);  Q, K, V, U = phi(X' W)                        (adaptive multi-channel self-attention)
    A_semantic = phi(Q K^T) / n per head;  A_time = alpha(t_i - t_j);  A_position = beta(i - j)
    H          = RMSN([A_position V | A_time V | A_semantic V]) * U      per head, over earlier positions
    O          = H W_o + X                                               (multi-stage FFN, first stage)
    Y          = (phi(O' W_1) * (O' W_3)) W_2 + O,  O' = RMSN(O)         (second stage: SwiGLU)

HSTU adds time and position to the semantic weights. Here each is a separate channel with its own part of U. alpha is
a table over the logarithm of time, beta a table over relative positions. There is no dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.models.hstu import TIME_BUCKETS, look_up, time_buckets

#: Hidden elements of the second stage per element of width.
FFN_MULTIPLE = 2


def rms_norm(x: Tensor) -> Tensor:
    """Last dimension divided by its root mean square; no learned scale, as in the authors' code."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


class FuXiBlock(nn.Module):
    """One block: [samples, t, width] -> the same, causal."""

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.uvqk = nn.Linear(width, 6 * width, bias=False)  # U has three parts, one per channel
        self.time_bias = nn.Parameter(torch.empty(TIME_BUCKETS))
        self.position_bias = nn.Parameter(torch.empty(longest))
        self.fuse = nn.Linear(3 * width, width)
        self.gate = nn.Linear(width, FFN_MULTIPLE * width, bias=False)
        self.up = nn.Linear(width, FFN_MULTIPLE * width, bias=False)
        self.down = nn.Linear(FFN_MULTIPLE * width, width, bias=False)
        # A channel's weights are not divided by n, so they start at the scale of a mean over the history.
        nn.init.normal_(self.time_bias, std=1 / longest)
        nn.init.normal_(self.position_bias, std=1 / longest)

    def forward(self, x: Tensor, apart: Tensor, buckets: Tensor, visible: Tensor) -> Tensor:
        """``apart``, ``buckets``, ``visible``: as in ``HSTUBlock``, but ``visible`` is 1 if position i sees j."""
        width, n = x.shape[-1], len(self.position_bias)
        u, v, q, k = F.silu(self.uvqk(rms_norm(x))).split([3 * width, width, width, width], dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        semantic = F.silu(q @ k.transpose(-1, -2)).mul(visible / n) @ v
        time = (look_up(self.time_bias, buckets) * visible)[:, None] @ v
        position = (look_up(self.position_bias, apart) * visible) @ v
        channels = torch.cat([position, time, semantic], dim=-1).transpose(1, 2).flatten(2)
        fused = self.fuse(rms_norm(channels) * u) + x
        normed = rms_norm(fused)
        return self.down(F.silu(self.gate(normed)) * self.up(normed)) + fused


class FuXi(nn.Module):
    """A stack of blocks over jagged histories; inputs and outputs are those of ``HSTU``.

    ``width`` elements per position (a multiple of ``heads``), ``layers`` blocks, histories of up to ``longest``.
    """

    def __init__(self, width: int, layers: int, heads: int, longest: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(longest, width))
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(FuXiBlock(width, heads, longest) for _ in range(layers))

    def forward(self, x: Tensor, timestamps: Tensor) -> Tensor:
        """[samples, t, width], padded at the end, and int64 seconds [samples, t] -> [samples, t, width].

        Position i has seen items 0..i, so real positions see no padding; the output at padded positions is meaningless.
        """
        steps = torch.arange(x.shape[1], device=x.device)
        apart = (steps[:, None] - steps[None, :]).clamp(min=0)
        visible = (steps[:, None] >= steps[None, :]).to(x.dtype)
        buckets = time_buckets(timestamps)
        x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x, apart, buckets, visible)
        return x
