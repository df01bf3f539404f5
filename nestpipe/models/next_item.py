"""Next-item prediction: a backbone over the history, sampled softmax over the target and the sample's negatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.config import ModelConfig, TrainingConfig
from nestpipe.data.batch import Batch
from nestpipe.data.dataset import Dataset
from nestpipe.data.tables import TableConfig
from nestpipe.models.fuxi import FuXi
from nestpipe.models.hstu import HSTU, pad, padded_index
from nestpipe.models.pacing import paced
from nestpipe.trainer import ModelSpec

TEMPERATURE = 0.1
#: By ``ModelConfig.backbone``; each is built from (width, layers, heads, longest).
BACKBONES: Mapping[str, Callable[[int, int, int, int], nn.Module]] = {"hstu": HSTU, "fuxi": FuXi}


class NextItem(nn.Module):
    """The dense part: maps embedded histories and negatives to one loss per sample."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, width = config.embedding_dim, config.width
        self.longest = config.sequence_length
        self.scale = dim**0.5
        self.enter = nn.Identity() if dim == width else nn.Linear(dim, width)
        self.backbone = BACKBONES[config.backbone](width, config.dense_layers, config.heads, config.sequence_length)
        self.leave = nn.Identity() if dim == width else nn.Linear(width, dim)

    def forward(self, embedded: Mapping[str, Any], batch: Batch) -> Tensor:
        """float32 [samples]: mean over a history's targets of the sampled softmax loss; 0 if it has no target.

        ``embedded``: features ``history`` and ``negatives``, each with ``values()`` [total, dim] and ``lengths()``.
        Negatives that are the target itself (accidental hits) do not count.
        """
        history, lengths = embedded["history"].values(), embedded["history"].lengths()
        index = padded_index(lengths, self._longest(lengths) + 1, len(history))
        items = pad(history, index)
        extra: Mapping[str, Any] = batch.extra
        ids = pad(extra["history_ids"].values(), index)
        times = pad(extra["timestamps"].values(), index)
        inputs = (lengths - 1).clamp(min=0)
        query = self.encode(items[:, :-1], times[:, :-1])
        target = self.represent(items[:, 1:])
        negative_ids = extra["negative_ids"]
        negative = self.represent(embedded["negatives"].values()).view(*negative_ids.shape, items.shape[-1])
        hits = ids[:, 1:, None] == negative_ids[:, None, :]
        against = (query @ negative.transpose(1, 2)).masked_fill(hits, -torch.inf)
        right = (query * target).sum(-1, keepdim=True)
        losses = torch.cat([right, against], dim=-1).logsumexp(-1) - right[..., 0]
        real = torch.arange(losses.shape[1], device=losses.device) < inputs[:, None]
        return (losses * real).sum(1) / inputs.clamp(min=1)

    def encode(self, items: Tensor, timestamps: Tensor) -> Tensor:
        """Predict the next item: embeddings [samples, t, dim], padded at the end -> queries [samples, t, dim].

        ``timestamps``: int64 seconds [samples, t]. The score of an item is the query's inner product
        with ``represent(its embedding)``.
        """
        hidden = self.leave(self.backbone(self.enter(items * self.scale), timestamps))
        return F.normalize(hidden, dim=-1, eps=1e-6) / TEMPERATURE

    def represent(self, items: Tensor) -> Tensor:
        """Item embeddings [..., dim], normalised as scores need them."""
        return F.normalize(items, dim=-1, eps=1e-6)

    def _longest(self, lengths: Tensor) -> int:
        """The length to pad to: the longest input or, on a device, where reading it would wait, the maximum."""
        if lengths.device.type != "cpu":
            return self.longest
        return max(1, int(lengths.max()) - 1) if len(lengths) else 1


class SequenceModel(nn.Module):
    """Embeddings and dense part. Written so that torchrec's pipelines can trace it."""

    def __init__(self, embeddings: nn.Module, dense: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense = dense

    def forward(self, batch: Batch) -> Tensor:
        embedded = self.embeddings(batch.sparse)
        return self.dense(embedded, batch)


def build_model_spec(training: TrainingConfig, dataset: Dataset) -> ModelSpec:
    """The model for next-item prediction on ``dataset``: one table, ``item``, read by both features."""
    dim = training.model.embedding_dim
    table = TableConfig("item", dataset.items, dim, ("history", "negatives"), scale=dim**-0.5)

    def build(embeddings: nn.Module) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(training.seed)
            dense: nn.Module = NextItem(training.model)
        if training.pace_dense_ms > 0:
            dense = paced(dense, training.pace_dense_ms)
        return SequenceModel(embeddings, dense)

    return ModelSpec((table,), build)
