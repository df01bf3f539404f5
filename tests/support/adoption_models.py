"""A TorchRec user's model and batches, for the tests of adoption."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nestpipe.trainer import SparseOptimizer

DIM, ROWS = 4, 23
SGD = SparseOptimizer("sgd", lr=0.3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass
class UserBatch:
    sparse: KeyedJaggedTensor
    dense: torch.Tensor
    label: torch.Tensor
    name: str = "clicks"


def bags(device=None, weighted=False):
    """Two tables; both have ``b``, and ``c`` shares table ``t2`` with it."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t1", feature_names=["a", "b"]),
            EmbeddingBagConfig(
                num_embeddings=ROWS, embedding_dim=DIM, name="t2", feature_names=["b", "c"],
                pooling=PoolingType.SUM if weighted else PoolingType.MEAN,
            ),
        ],
        is_weighted=weighted,
        device=device,
    )  # fmt: skip


def keys(samples: int, seed: int, weighted: bool = False, one: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.ones(3 * samples).long() if one else torch.randint(0, 4, (3 * samples,), generator=generator)
    total = int(lengths.sum())
    values = torch.randint(0, ROWS, (total,), generator=generator)
    weights = torch.rand(total, generator=generator) if weighted else None
    return KeyedJaggedTensor(keys=["a", "b", "c"], values=values, lengths=lengths, weights=weights)


def user_batch(samples: int, seed: int, weighted: bool = False) -> UserBatch:
    generator = torch.Generator().manual_seed(100 + seed)
    dense, label = torch.randn(samples, 3, generator=generator), torch.randn(samples, generator=generator)
    return UserBatch(keys(samples, seed, weighted), dense, label)


class Clicks(nn.Module):
    """Any model: pooled embeddings and dense features, mean squared error, (loss, predictions)."""

    def __init__(self, collection, middle=None, loss=None):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.collection = collection
            self.net = nn.Sequential(nn.Linear(4 * DIM + 3, 8), middle or nn.Tanh(), nn.Linear(8, 1))
        self.loss = loss or (lambda score, label: (score - label).square().mean())

    def forward(self, batch):
        pooled = self.collection(batch.sparse)
        pooled = torch.cat([pooled[name] for name in ("a", "b@t1", "b@t2", "c")], 1)
        score = self.net(torch.cat([pooled, batch.dense], 1)).squeeze(1)
        return self.loss(score, batch.label), score
