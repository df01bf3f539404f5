"""The model of a case, written as a TorchRec user would."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from nestpipe.adoption import Summed
from tests.fuzz.cases import DIM, ROWS, Case, Collection, Lookup
from tests.fuzz.data import Kind, field
from tests.fuzz.ids import changed, keyed_of


class Model(nn.Module):
    """It takes a batch of the case's type and returns its loss, or (loss, anything)."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        habits = case.habits
        with torch.random.fork_rng():
            torch.manual_seed(case.seed + 5)
            self.collections = nn.ModuleList([_collection(c, n) for n, c in enumerate(case.collections)])
        width = sum(len(case.collections[look.collection].keys) for look in case.lookups) * DIM + 3
        if "alias" in habits:
            self.alias = nn.ModuleDict({"same": self.collections[0]})
        if "list" in habits:
            self.held = list(self.collections)
        self.dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(case.precision, torch.float32)
        self.net: nn.Sequential | None = None
        if case.precision != "none":
            rate = 0.3 if case.repeat else 0.0
            middle = nn.Dropout(rate) if "dropout off" in habits or case.repeat else nn.Identity()
            self.net = nn.Sequential(nn.Linear(width, 5), nn.Tanh(), middle, nn.Linear(5, 1)).to(self.dtype)
            if "unused" in habits:
                self.unused = nn.Linear(2, 2)
            if "frozen weight" in habits:
                self.net[0].bias.requires_grad_(False)
            if "outside" in habits:
                sparse = case.dense == "sgd" and case.update != "clip"
                self.outside = nn.EmbeddingBag(ROWS, 3, mode="sum", sparse=sparse)
            if "norm" in habits:
                self.norm = nn.LayerNorm(3) if case.seed % 2 else nn.BatchNorm1d(3).eval()
        if "buffer" in habits:
            self.register_buffer("average", torch.zeros(()))
        self.passes = 0

    def forward(self, batch: Any) -> Any:
        pooled = torch.cat([self._looked_up(batch, n) for n in range(len(self.case.lookups))], 1)
        dense = field(batch, "dense")
        if self.net is not None and "norm" in self.case.habits:
            dense = self.norm(dense)
        if self.net is not None and "outside" in self.case.habits:
            dense = dense + self.outside(field(batch, "dense_ids"))
        inputs = torch.cat([pooled, dense], 1)
        if self.net is None:
            score = inputs.sum(1)
        elif "checkpoint" in self.case.habits:
            score = checkpoint(self.net, inputs.to(self.dtype), use_reentrant=False).squeeze(1)
        else:
            score = self.net(inputs.to(self.dtype)).squeeze(1)
        score = self._with_extras(batch, score.to(torch.promote_types(self.dtype, torch.float32)))
        return self._output(self._loss(batch, score, pooled), score, batch)

    def _looked_up(self, batch: Any, n: int) -> Tensor:
        look = self.case.lookups[n]
        spec = self.case.collections[look.collection]
        collection = self.collections[look.collection]
        if n and look.collection == 0 and "alias" in self.case.habits:
            collection = self.alias["same"]
        elif n and "list" in self.case.habits:
            collection = self.held[look.collection]
        dense = field(batch, "dense")
        nothing = dense.new_zeros(len(dense), len(spec.keys) * DIM)
        if look.source in "xy":
            keyed = field(batch, look.source)
            if keyed is None or (look.change == "sometimes" and field(batch, "dense").sum() > 0):
                return nothing
            keyed = changed(keyed, look.change, batch, spec)
        else:
            keyed = keyed_of(batch, look.source, spec)
        if look.after == "no gradient":
            with torch.no_grad():
                return self._pooled(collection(keyed), spec)
        pooled = self._pooled(collection(keyed), spec)
        return _afterwards(pooled, look, lambda: self._pooled(collection(keyed), spec))

    def _pooled(self, found: Any, spec: Collection) -> Tensor:
        if not isinstance(found, dict):
            return found.values()
        pieces = []
        for jagged in found.values():
            sample = torch.repeat_interleave(torch.arange(len(jagged.lengths())), jagged.lengths())
            values = jagged.values()
            if spec.indices:
                values = values * (1 + 0.01 * jagged.weights()[:, None])
            pieces.append(torch.zeros(len(jagged.lengths()), DIM).index_add(0, sample, values))
        return torch.cat(pieces, 1)

    def _with_extras(self, batch: Any, score: Tensor) -> Tensor:
        parts = {name: field(batch, name) for name in self.case.extras}
        if "string" in parts:
            score = score + 0.1 * len(parts["string"])
        if "number" in parts:
            score = score * parts["number"] / 2
        if "shared" in parts:
            score = score + parts["shared"].mean()
        if "list" in parts:
            score = score + torch.tensor(parts["list"])
        if "names" in parts:
            score = score + 0.1 * torch.tensor([len(name) for name in parts["names"]])
        if "flag" in parts:
            score = torch.where(parts["flag"], score, 0.5 * score)
        if "matrix" in parts:
            score = score + parts["matrix"].sum((1, 2)).to(score.dtype)
        if "enum" in parts and parts["enum"] is Kind.ODD:
            score = score + 0.3
        if parts.get("nothing") is not None:
            score = score + 0.1 * parts["nothing"]
        if "pooled" in parts:
            score = score * parts["pooled"]["q"].mean(1)
        if "jagged" in parts:
            jagged = parts["jagged"]
            weights = jagged.weights_or_none()
            weights = jagged.values().float() if weights is None else weights
            sample = torch.repeat_interleave(torch.arange(len(jagged.lengths())), jagged.lengths())
            score = score + torch.zeros_like(score).index_add(0, sample, weights.to(score.dtype))
        if "buffer" in self.case.habits and self.training:
            self.average.mul_(0.5).add_(0.5 * score.detach().mean().float())
            score = score - self.average
        if "counter" in self.case.habits and self.training:
            self.passes += 1
            score = score / self.passes
        return score

    def _loss(self, batch: Any, score: Tensor, pooled: Tensor) -> Any:
        kind, weight = self.case.loss, field(batch, "weight")
        label = field(batch, "label").to(score.dtype)
        each = F.smooth_l1_loss(score, label, reduction="none")
        if (constant := field(batch, "constant")) is not None:
            each = each * constant
        if kind == "tokens":
            return Summed((each * weight).sum(), weight.sum())
        if kind == "clicked":
            clicked = label > 0.3
            return Summed(each[clicked].sum(), int(clicked.sum()) if self.case.seed % 2 else clicked.sum())
        if kind in ("weighted", "weighted later"):
            return (each * weight).sum() / weight.sum()
        if kind == "masked":
            return each[weight > 0].mean()
        if weight is not None:
            each = each * weight
        whole = {
            "each": lambda: each,
            "column": lambda: each[:, None],
            "sum": lambda: each.sum(),
            "two": lambda: each.mean() + 0.5 * score.square().mean(),
            "normal": lambda: F.gaussian_nll_loss(score, label, F.softplus(score) + 0.1),
            "baseline": lambda: (each * (score - score.mean()).detach()).mean(),
            "centred": lambda: (each * (score - score.mean()).square()).mean(),
            "listwise": lambda: -(label.softmax(0) * score.log_softmax(0)).sum(),
            "neighbour": lambda: (each * score.roll(1)).mean(),
        }
        if kind in whole:
            return whole[kind]()
        if kind == "penalty" and self.net is not None:
            return each.mean() + 0.01 * self.net[0].weight.square().sum() + 0.01 * pooled.square().sum(1).mean()
        if kind == "in batch" or (kind == "in batch while training" and self.training):
            return F.cross_entropy(score[:, None] * score[None, :], torch.arange(len(score)))
        return each.mean()

    def _output(self, loss: Any, score: Tensor, batch: Any) -> Any:
        label = field(batch, "label")
        kind = self.case.output
        if kind == "single":
            return loss
        if kind == "three":
            return loss, score, label
        second = {
            "dict": lambda: {"score": score, "label": label},
            "nested": lambda: (score, [{"label": label}]),
            "jagged": lambda: JaggedTensor(torch.repeat_interleave(score, 2), lengths=torch.full((len(score),), 2)),
        }
        return loss, second.get(kind, lambda: score)()


def _afterwards(pooled: Tensor, look: Lookup, again: Any) -> Tensor:
    if look.after == "detached":
        return pooled.detach()
    if look.after == "in place":
        return pooled.mul_(1.5)
    return pooled + again() if look.after == "twice" else pooled


def _collection(spec: Collection, number: int) -> nn.Module:
    bags = spec.kind == "bags"
    config = EmbeddingBagConfig if bags else EmbeddingConfig
    tables = []
    for n, (names, pooling, rows) in enumerate(spec.tables):
        how = {"pooling": PoolingType[pooling]} if bags else {}
        tables.append(
            config(num_embeddings=rows, embedding_dim=DIM, name=f"t{number}_{n}", feature_names=list(names), **how)
        )
    if bags:
        made: nn.Module = EmbeddingBagCollection(tables, is_weighted=spec.weighted)
    else:
        made = EmbeddingCollection(tables, need_indices=spec.indices)
    if spec.frozen:
        next(iter(made.parameters())).requires_grad_(False)
    return made
