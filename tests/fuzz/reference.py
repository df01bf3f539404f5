"""The same training in a plain loop: one whole model, gradients averaged over ranks by hand, no code of NestPipe."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim import RowWiseAdagrad

from nestpipe.adoption import Summed
from tests.fuzz.cases import Case
from tests.fuzz.programs import Model, batches, field, prepared

LR, ADAGRAD_EPS = 0.2, 1e-2


@dataclass
class Trained:
    """Losses of the global batches; weights by name, tables included; rank 0's scores in the last step."""

    losses: list[float]
    weights: dict[str, Tensor]
    scores: Tensor | None


def started(case: Case, rank: int) -> Model:
    """The model as a rank makes it. Tables are the same everywhere; with the habit ``seeds`` other weights are not."""
    torch.manual_seed(case.seed + 1 + (100 * rank if "seeds" in case.habits else 0))
    return Model(case)


def dense_optimizer(case: Case) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.1),
    }[case.dense]


def tables(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: table.weight
        for collection in model.collections
        for name, table in (getattr(collection, "embedding_bags", None) or collection.embeddings).items()
    }


def global_steps(case: Case, ahead: int) -> Iterator[tuple[Any, ...]]:
    """The batches of all ranks, step by step; None for a rank whose pass has ended."""
    for number, sizes in enumerate(case.passes):
        data = [list(batches(case, number, rank)) for rank in range(case.ranks)]
        if number == 0 and case.cut:  # batches that have been read when the pass is left are trained
            data = [rows[: case.cut + ahead] for rows in data]
        yield from zip_longest(*data)
        assert len(sizes) == case.ranks


def plain(case: Case, ahead: int) -> Trained:
    model = started(case, 0)
    rows = tables(model)
    trained_rows = [p for p in rows.values() if p.requires_grad]
    others = [p for p in model.parameters() if all(p is not row for row in rows.values())]
    optimizers: list[torch.optim.Optimizer] = [dense_optimizer(case)(others)] if others else []
    if trained_rows:
        sgd = case.sparse == "sgd"
        optimizers.append(
            torch.optim.SGD(trained_rows, lr=LR) if sgd else RowWiseAdagrad(trained_rows, lr=LR, eps=ADAGRAD_EPS)
        )
    losses, scores = [], None
    model.states = [(0, torch.zeros(())) for _ in range(case.ranks)]  # what each rank's model keeps between passes
    for step in global_steps(case, ahead):
        losses.append(_train(case, model, step, trained_rows))
        scores = model.last
        for optimizer in optimizers:
            optimizer.step()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Trained(losses, weights, scores)


def _train(case: Case, model: Any, step: tuple[Any, ...], rows: list[nn.Parameter]) -> float:
    """Leave the gradients of one global batch in the weights. Returns its loss."""
    for parameter in model.parameters():
        parameter.grad = None
    found = []
    model.last = None
    for rank, batch in enumerate(step):
        if batch is None or not len(field(batch, "label")):
            continue
        batch = copy.deepcopy(batch)
        model.passes, average = model.states[rank]
        if "buffer" in case.habits:
            model.average.copy_(average)
        loss, score = model(prepared(batch) if case.preprocess else batch)
        model.states[rank] = (model.passes, model.average.clone() if "buffer" in case.habits else average)
        found.append((loss, len(score)))
        if rank == 0:
            model.last = score.detach()
    if not found:
        return 0.0
    total: Any = 0.0
    samples = sum(n for _, n in found)
    count = sum(loss.count for loss, _ in found if isinstance(loss, Summed))
    for loss, n in found:
        if isinstance(loss, Summed):
            total = total + loss.total / count
        elif case.loss == "sum":
            total = total + loss / case.ranks
        elif case.average == "ranks":
            total = total + loss.mean() / case.ranks
        else:
            total = total + loss.mean() * n / samples
    total.backward()
    for row in rows:
        row.grad = torch.zeros_like(row) if row.grad is None else row.grad
    return float(total)
