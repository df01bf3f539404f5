"""A small torchrec model, its batches and optimizers, for tests of the baselines."""

from __future__ import annotations

import torch
from torch import nn

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.tables import TableConfig
from nestpipe.embedding.host_table import initial_rows

TABLES = (
    TableConfig("item", 61, 8, ("history", "target"), 0.5),
    TableConfig("tag", 5, 8, ("tags",), 0.5),
)
SEED = 3


class Model(nn.Module):
    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.dense = embeddings, Mlp()

    def forward(self, batch):
        embedded = self.embeddings(batch.sparse)
        return self.dense(embedded, batch)


class PlainEmbeddings(nn.Module):
    """Whole tables with dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        rows = {t.name: nn.Parameter(initial_rows(SEED, t, 0, t.rows)) for t in TABLES}
        self.tables = nn.ParameterDict(rows)

    def forward(self, sparse):
        return {
            f: Jagged(self.tables[t.name][sparse[f].values()], sparse[f].lengths()) for t in TABLES for f in t.features
        }


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def make_batch(step: int, rank: int, samples: int, known: int | None) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)

    def jagged(rows: int, longest: int) -> Jagged:
        counts = torch.randint(0, longest + 1, (samples,), generator=generator)
        return Jagged(torch.randint(0, rows, (int(counts.sum()),), generator=generator), counts)

    sparse = {"history": jagged(61, 6), "target": jagged(61, 2), "tags": jagged(5, 3)}
    return Batch(
        sparse,
        torch.arange(samples),
        {"label": torch.randn(samples, generator=generator)},
        known,
    )


class Mlp(nn.Module):
    """Mean-pooled features through an MLP: a squared error per sample."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.hidden, self.out = nn.Linear(24, 16), nn.Linear(16, 1)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)

    def forward(self, embedded, batch):
        pooled = [self.mean(embedded[name]) for name in ("history", "target", "tags")]
        return (self.out(self.hidden(torch.cat(pooled, 1)).tanh()).squeeze(1) - batch.extra["label"]) ** 2

    def mean(self, jagged):
        lengths = jagged.lengths()
        sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        sums = torch.zeros(len(lengths), 8).index_add(0, sample, jagged.values())
        return sums / lengths.clamp(min=1)[:, None]
