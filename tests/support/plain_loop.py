"""Training without a framework: one process, autograd, two optimizers. The reference for results and step time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nestpipe.config import TrainingConfig
from nestpipe.data import Dataset, Jagged
from nestpipe.data.tables import TableConfig
from nestpipe.datasets.loader import load_dataset
from nestpipe.models.next_item import build_model_spec
from nestpipe.models.ranking_quality import evaluate


class PlainEmbeddings(nn.Module):
    """``nn.Embedding`` with sparse gradients behind the interface of an embedding collection."""

    def __init__(self, tables: tuple[TableConfig, ...], seed: int) -> None:
        super().__init__()
        self.table_of = {feature: table.name for table in tables for feature in table.features}
        generator = torch.Generator().manual_seed(seed)
        weights = {
            table.name: (torch.rand(table.rows, table.dim, generator=generator) * 2 - 1) * table.scale
            for table in tables
        }
        self.tables = nn.ModuleDict(
            {name: nn.Embedding.from_pretrained(w, freeze=False, sparse=True) for name, w in weights.items()}
        )

    def forward(self, sparse: Mapping[str, Jagged]) -> dict[str, Jagged]:
        embedded = {}
        for name, table in self.tables.items():
            mine = {n: feature for n, feature in sparse.items() if self.table_of[n] == name}
            values = table(torch.cat([feature.flat for feature in mine.values()]))
            parts = values.split([len(feature.flat) for feature in mine.values()])
            embedded |= {n: Jagged(part, mine[n].counts) for n, part in zip(mine, parts, strict=True)}
        return embedded


class RowwiseAdagrad:
    """state += mean over dim of gradient squared; weight -= lr * gradient / (sqrt(state) + eps), touched rows only."""

    def __init__(self, weights: list[nn.Parameter], lr: float, eps: float) -> None:
        self.weights, self.lr, self.eps = weights, lr, eps
        self.states = [torch.zeros(len(weight)) for weight in weights]

    @torch.no_grad()
    def step(self) -> None:
        for weight, state in zip(self.weights, self.states, strict=True):
            gradient = weight.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            state[rows] += values.square().mean(1)
            weight[rows] -= self.lr * values / (state[rows].sqrt() + self.eps)[:, None]
            weight.grad = None


@dataclass(frozen=True)
class PlainResult:
    """The trained model and table, the loss of every step, seconds per step, and metrics by epoch if asked for."""

    model: nn.Module
    table: Tensor
    losses: list[float]
    seconds: list[float]
    metrics: dict[int, dict[str, float]]


def train_plain(
    training: TrainingConfig,
    epochs: int = 1,
    dataset: Dataset | None = None,
    max_steps: int | None = None,
    evaluate_every: int = 0,
) -> PlainResult:
    """Train ``epochs`` epochs, or ``max_steps`` steps; evaluate after every ``evaluate_every`` epochs if not 0."""
    torch.set_num_threads(1)
    dataset = dataset or load_dataset(training.data, training.model, training.seed)
    spec = build_model_spec(training, dataset)
    model = spec.build(PlainEmbeddings(spec.tables, training.seed))
    options = training.optimizer
    tables = [t.weight for t in model.embeddings.tables.values()]
    sparse = RowwiseAdagrad(tables, options.sparse_lr, options.sparse_eps)
    dense = torch.optim.Adam(model.dense.parameters(), lr=options.dense_lr)
    losses, seconds, metrics = [], [], {}
    steps = dataset.steps_per_epoch(1)
    for step, batch in enumerate(dataset.batches(0, 1, epochs=epochs), 1):
        started = time.perf_counter()
        loss = model(batch).sum() / batch.global_samples
        loss.backward()
        sparse.step()
        dense.step()
        dense.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        if evaluate_every and step % (steps * evaluate_every) == 0:
            metrics[step // steps] = evaluate(model, tables[0].detach(), dataset)
        if step == max_steps:
            break
    return PlainResult(model, tables[0].detach(), losses, seconds, metrics)
