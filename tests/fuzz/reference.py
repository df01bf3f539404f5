"""The same training in a plain loop: one whole model, gradients averaged over ranks by hand, no code of NestPipe."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import JaggedTensor

from nestpipe.adoption import Summed
from tests.fuzz import data
from tests.fuzz.cases import Case
from tests.fuzz.models import Model

LR, ADAGRAD_EPS = 0.2, 1e-2


@dataclass
class Trained:
    """Losses of the global batches; weights by name, tables included; rank 0's outputs in the last step.

    ``buffers``: rank 0's. ``again``: the losses of a second run from the same seed.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    outputs: list[Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    again: list[float] = field(default_factory=list)


def started(case: Case, rank: int) -> Model:
    """The model as a rank makes it. Tables are the same everywhere; with the habit ``seeds`` other weights are not."""
    torch.manual_seed(case.seed + 1 + (100 * rank if "seeds" in case.habits else 0))
    return Model(case)


class _Clipped(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


def dense_optimizer(case: Case) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    if case.update == "clip":
        return lambda p: _Clipped(p, lr=0.1)
    make: Any = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.1),
    }[case.dense]
    if case.update == "groups":
        return lambda p: make([{"params": p[:1], "lr": 0.02}, {"params": p[1:]}] if len(p) > 1 else p)
    return make


def after_step(case: Case, step: int, model: Any, scheduler: Any) -> None:
    """What a user's loop does after step number ``step`` that changes how the model is trained."""
    if scheduler is not None:
        scheduler.step()
    if "freeze later" in case.habits and model.net is not None and step == 0:
        model.net[3].weight.requires_grad_(False)


def scheduler_of(case: Case, optimizer: Any) -> Any:
    if case.update != "schedule" or optimizer is None:
        return None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def tables(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: table.weight
        for collection in model.collections
        for name, table in (getattr(collection, "embedding_bags", None) or collection.embeddings).items()
    }


def pieces(value: Any) -> list[Tensor]:
    """The tensors in a model's output."""
    if isinstance(value, Tensor):
        return [value.detach().clone()]
    if isinstance(value, JaggedTensor):
        return [value.values().detach().clone(), value.lengths().clone()]
    if isinstance(value, dict | tuple | list):
        return [t for part in (value.values() if isinstance(value, dict) else value) for t in pieces(part)]
    return []


def wanted_steps(case: Case, ahead: int) -> list[tuple[Any, ...]]:
    """The batches of all ranks, step by step; None for a rank whose pass has ended."""
    calls = None
    if case.stop:
        lengths = [len(sizes[0]) for sizes in case.passes[:-1]]
        if case.cut:  # the end of another pass comes after what was in flight
            to_the_end = len(lengths) > 1 and case.loop != "count"
            lengths[0] = min(lengths[0], case.cut + ahead) if to_the_end else case.cut
        calls = sum(lengths) + case.stop
    return list(islice(_all_steps(case, ahead), calls))


def _all_steps(case: Case, ahead: int) -> Iterator[tuple[Any, ...]]:
    for number in range(len(case.passes)):
        rows = [list(data.batches(case, number, rank)) for rank in range(case.ranks)]
        if number == 0 and case.cut:  # batches that have been read when the pass is left are trained
            rows = [some[: case.cut + ahead] for some in rows]
        yield from zip_longest(*rows)


def plain(case: Case, ahead: int) -> Trained:
    model = started(case, 0)
    rows = tables(model)
    trained_rows = [p for p in rows.values() if p.requires_grad]
    others = [p for p in model.parameters() if all(p is not row for row in rows.values())]
    optimizers: list[torch.optim.Optimizer] = [dense_optimizer(case)(others)] if others else []
    scheduler = scheduler_of(case, optimizers[0]) if optimizers else None
    if trained_rows:
        sgd = case.sparse == "sgd"
        optimizers.append(
            torch.optim.SGD(trained_rows, lr=LR) if sgd else RowWiseAdagrad(trained_rows, lr=LR, eps=ADAGRAD_EPS)
        )
    losses, outputs = [], []
    model.states = [(0, torch.zeros(())) for _ in range(case.ranks)]  # what each rank's model keeps between passes
    for number, step in enumerate(wanted_steps(case, ahead)):
        loss, outputs = _train(case, model, step, trained_rows)
        losses.append(loss)
        for optimizer in optimizers:
            optimizer.step()
        after_step(case, number, model, scheduler)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    if "average" in buffers:
        buffers["average"] = model.states[0][1]
    return Trained(losses, weights, outputs, buffers)


def _train(case: Case, model: Any, step: tuple[Any, ...], rows: list[nn.Parameter]) -> tuple[float, list[Tensor]]:
    """Leave the gradients of one global batch in the weights. Returns its loss, and rank 0's outputs."""
    for parameter in model.parameters():
        parameter.grad = None
    found = []
    outputs: list[Tensor] = []
    for rank, batch in enumerate(step):
        samples = 0 if batch is None else len(data.field(batch, "label"))
        if not samples:
            continue
        batch = copy.deepcopy(batch)
        model.passes, average = model.states[rank]
        if "buffer" in case.habits:
            model.average.copy_(average)
        output = model(data.prepared(batch) if case.preprocess else batch)
        loss = output[0] if isinstance(output, tuple) else output
        model.states[rank] = (model.passes, model.average.clone() if "buffer" in case.habits else average)
        found.append((loss, samples))
        if rank == 0 and isinstance(output, tuple):
            outputs = pieces(output[1:])
    if not found:
        return 0.0, []
    total: Any = 0.0
    samples = sum(n for _, n in found)
    count = sum(loss.count for loss, _ in found if isinstance(loss, Summed))
    for loss, n in found:
        if isinstance(loss, Summed):
            total = total + (loss.total / count if count else 0.0 * loss.total)
        elif case.loss == "sum":
            total = total + loss / case.ranks
        elif case.average == "ranks":
            total = total + loss.mean() / case.ranks
        else:
            total = total + loss.mean() * n / samples
    total.backward()
    for row in rows:
        row.grad = torch.zeros_like(row) if row.grad is None else row.grad
    return float(total), outputs
