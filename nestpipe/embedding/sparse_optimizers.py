"""Sparse update rules, applied once per batch to the rows of the active buffer.

SGD and AdaGrad use the formulas of fbgemm's exact kernels, so that real TorchRec and this engine train in the same way.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from nestpipe.embedding.retrieval_write_back import Rows
from nestpipe.trainer import SparseOptimizer

RULES = ("sgd", "rowwise_adagrad", "adam")


def state_width(optimizer: SparseOptimizer, dim: int) -> int:
    """float32 state values per row of ``dim`` elements. Raises ValueError, with the known rules, for an unknown one."""
    if optimizer.name not in RULES:
        raise ValueError(f"unknown sparse optimizer '{optimizer.name}', one of {', '.join(RULES)}")
    return {"sgd": 0, "rowwise_adagrad": 1, "adam": 2 * dim + 1}[optimizer.name]


def sparse_update(optimizer: SparseOptimizer, rows: Rows, gradient: Tensor) -> None:
    """Update ``rows`` in place from ``gradient`` float32 [n, dim], which may be overwritten.

    sgd: w -= lr g. rowwise_adagrad: s += mean over dim of g^2; w -= lr g / (sqrt(s) + eps).
    adam (Kingma and Ba 2015, as ``torch.optim.SparseAdam``), state m, v and the row's own count k of updates:
    k += 1; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= lr m / (1 - b1^k) / (sqrt(v / (1 - b2^k)) + eps).
    Adam is lazy: a row that a batch does not touch keeps m, v and k, so the bias correction follows the row's updates
    and not the training steps. SparseAdam has one count for all rows, so it corrects a row's first update by the step
    number.
    """
    if optimizer.name == "adam":
        _adam(optimizer, rows, gradient)
        return
    if optimizer.name == "rowwise_adagrad":
        # A norm reads the gradient once, while squaring it first would write a copy.
        rows.state += gradient.norm(dim=1, keepdim=True).square_().div_(gradient.shape[1])
        gradient.div_(rows.state.sqrt().add_(optimizer.eps))
    rows.weight.add_(gradient, alpha=-optimizer.lr)


def _adam(optimizer: SparseOptimizer, rows: Rows, gradient: Tensor) -> None:
    first, second = optimizer.betas
    m, v, count = rows.state.split([gradient.shape[1], gradient.shape[1], 1], dim=1)
    count += 1
    m.lerp_(gradient, 1 - first)
    v.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    root = (v / _one_minus_power(second, count)).sqrt_().add_(optimizer.eps)
    rows.weight.sub_((m / _one_minus_power(first, count)).div_(root), alpha=optimizer.lr)


def _one_minus_power(beta: float, count: Tensor) -> Tensor:
    """1 - beta^count without cancellation."""
    return torch.expm1(count * math.log(beta)).neg_()


def momentum_scaled(optimizer: SparseOptimizer, scale: float) -> SparseOptimizer:
    """AdaGrad with its accumulator divided by ``scale`` (2D-SP), by changing lr and eps; other rules are unchanged.

    w -= lr g / (sqrt(s / c) + eps) is the rule above with lr sqrt(c) and eps sqrt(c), where c is ``scale``.
    """
    if optimizer.name != "rowwise_adagrad":
        return optimizer
    root = math.sqrt(scale)
    return replace(optimizer, lr=optimizer.lr * root, eps=optimizer.eps * root)


def averaged_update(optimizer: SparseOptimizer, rows: Rows, gradients: Tensor) -> None:
    """2D-SP's rule with interval 1: update each replica by its own group's gradients, then take the replicas' mean.

    ``gradients`` float32 [groups, n, dim]: each group's share of the whole gradient; may be overwritten. The
    replicas are equal before, so every rank computes all of them from the same ``rows``.
    """
    groups = len(gradients)
    weight = torch.zeros_like(rows.weight)
    state = torch.zeros_like(rows.state)
    for gradient in gradients:
        replica = Rows(rows.weight.clone(), rows.state.clone())
        sparse_update(optimizer, replica, gradient.mul_(groups))
        weight.add_(replica.weight)
        state.add_(replica.state)
    rows.weight.copy_(weight.div_(groups))
    rows.state.copy_(state.div_(groups))
