"""Models of torchrec's examples that are not in its wheel, written here from their description, and smaller."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mlp import MLP

from nestpipe.adoption.losses import Summed


class TwoTowers(nn.Module):
    """Retrieval: a tower for each of two keys, the dot product of both, binary cross-entropy."""

    def __init__(self, collection: EmbeddingBagCollection, layers: list[int], softmax: bool = False) -> None:
        super().__init__()
        self.ebc = collection
        self.names = [config.feature_names[0] for config in collection.embedding_bag_configs()]
        dim = collection.embedding_bag_configs()[0].embedding_dim
        self.towers = nn.ModuleList(MLP(dim, layers) for _ in range(2))
        self.softmax = softmax

    def forward(self, batch):
        pooled = self.ebc(batch.sparse_features)
        query, candidate = (tower(pooled[name]) for tower, name in zip(self.towers, self.names, strict=True))
        if self.softmax:  # the candidates of the batch are each other's negatives
            logits = query @ candidate.T
            loss = F.cross_entropy(logits, torch.arange(logits.shape[0]))
        else:
            logits = (query * candidate).sum(dim=1).squeeze()
            loss = F.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


class Bert4Rec(nn.Module):
    """Masked items of a sequence: item and position embeddings, transformer blocks, cross-entropy of masked items.

    ``mean``: of the loss over masked items; ``summed``: of the loss the sum and the number; ``each``: per sample.
    """

    def __init__(self, items: int, longest: int, dim: int, loss: str) -> None:
        super().__init__()
        config = EmbeddingConfig(num_embeddings=items, embedding_dim=dim, name="item_embedding", feature_names=["item"])
        self.ec = EmbeddingCollection(tables=[config])
        self.positions = nn.Parameter(torch.randn(longest, dim))
        self.norm = nn.LayerNorm([longest, dim])
        block = nn.TransformerEncoderLayer(dim, 2, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, items)
        self.longest, self.loss = longest, loss

    def forward(self, batch):
        ids = batch.sparse_features
        rows = self.ec(ids)["item"]
        wide = torch.ops.fbgemm.jagged_2d_to_dense(rows.values(), rows.offsets(), self.longest)
        wide = wide.view(-1, self.longest, rows.values().shape[1])
        seen = ids["item"].to_padded_dense(self.longest) > 0
        logits = self.out(self.blocks(self.norm(wide + self.positions), src_key_padding_mask=~seen))
        each = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=0, reduction="none")
        count = (batch.labels != 0).sum()
        if self.loss == "summed":
            return Summed(each.sum(), count), logits.detach()
        return (each.sum() / count if self.loss == "mean" else each.view(len(batch.labels), -1).sum(1)), logits.detach()


class WithDenseTable(nn.Module):
    """DLRM whose last table is no part of the collection: every rank has it whole, with an optimizer of its own."""

    def __init__(self, model: nn.Module, rows: int, dim: int) -> None:
        super().__init__()
        self.model, self.own = model, nn.EmbeddingBag(rows, dim, mode="sum")
        self.out = nn.Linear(dim, 1)

    def forward(self, batch):
        last = batch.sparse_features[batch.sparse_features.keys()[-1]]
        more = self.out(self.own(last.values().long(), last.offsets()[:-1].long()))
        score = (self.model(batch.dense_features, batch.sparse_features) + more).squeeze(-1)
        return F.binary_cross_entropy_with_logits(score, batch.labels.float()), score
