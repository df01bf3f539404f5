"""What a case means: its batches, and its model, written as a TorchRec user would."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from nestpipe.adoption import Summed
from tests.fuzz.cases import DIM, ROWS, Case, Collection

NAMES = ("x", "y", "dense", "label", "weight", "constant", "string", "number", "shared", "jagged", "list")
Tuple = namedtuple("Tuple", NAMES)  # type: ignore[misc]


@dataclass
class Plain:
    x: Any
    y: Any
    dense: Tensor
    label: Tensor
    weight: Any = None
    constant: Any = None
    string: Any = None
    number: Any = None
    shared: Any = None
    jagged: Any = None
    list: Any = None


class Own:
    """A type that nothing knows how to cut."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


OWN_TYPES = {Own: (lambda own: own.fields, Own)}


def field(batch: Any, name: str) -> Any:
    if isinstance(batch, Own):
        return batch.fields[name]
    if isinstance(batch, dict):
        return batch[name] if name in batch else batch["inner"][0][name]
    return getattr(batch, name)


def batches(case: Case, passing: int, rank: int) -> Iterator[Any]:
    """The batches of a pass on a rank."""
    generator = torch.Generator().manual_seed(case.seed * 1009 + passing * 31 + rank)
    for step, samples in enumerate(case.passes[passing][rank]):
        yield _batch(case, passing, step, samples, generator)


def _batch(case: Case, passing: int, step: int, n: int, generator: torch.Generator) -> Any:
    fields: dict[str, Any] = dict.fromkeys(NAMES)
    for name, keys in case.keys:
        order = list(keys) if step % 2 else list(reversed(keys))
        fields[name] = _keyed(case, order, n, generator)
    fields["dense"] = torch.randn(n, 3, generator=generator)
    fields["label"] = torch.randn(n, generator=generator)
    first = passing == 0 and step == 0
    there = {"no": False, "later": not first, "at first": first, "always": True}[case.optional]
    weight = torch.rand(n, generator=generator) + 0.2
    if case.loss == "weighted later":
        fields["weight"] = torch.ones(n) if step < 2 else weight
    elif case.loss in ("weighted", "tokens", "masked"):
        fields["weight"] = weight
        if case.loss == "masked":  # of many samples, or of exactly one, so that most parts of the batch have none
            few = torch.arange(n) == n // 2
            fields["weight"] = (few if case.seed % 2 else weight > 0.6).float()
    elif there:
        fields["weight"] = weight
    if "constant" in case.extras:
        fields["constant"] = 0.5 + 0.25 * step
    if "string" in case.extras:
        fields["string"] = "s" * (step + 1)
    if "number" in case.extras:
        fields["number"] = torch.tensor(1.0 + step)
    if "shared" in case.extras:
        fields["shared"] = torch.randn(5, generator=generator)
    if "list" in case.extras:
        fields["list"] = [0.1 * k for k in range(n)]
    if "jagged" in case.extras:
        lengths = torch.randint(0, 3, (n,), generator=generator)
        total = int(lengths.sum())
        values = torch.arange(total)
        fields["jagged"] = JaggedTensor(values, lengths=lengths, weights=torch.rand(total, generator=generator))
    return _wrapped(case.batch, fields)


def _wrapped(kind: str, fields: dict[str, Any]) -> Any:
    if kind == "dataclass":
        return Plain(**fields)
    if kind == "namedtuple":
        return Tuple(**fields)
    if kind == "own":
        return Own(fields)
    if kind == "nested":
        inner = {name: fields.pop(name) for name in ("x", "dense", "constant", "weight")}
        return {**fields, "inner": [inner]}
    return fields


def _keyed(case: Case, keys: list[str], n: int, generator: torch.Generator) -> KeyedJaggedTensor:
    low, high = (1, 1) if case.ids.startswith("one") else (0, 3)
    lengths = torch.randint(low, high + 1, (len(keys) * n,), generator=generator, dtype=torch.int32)
    total = int(lengths.sum())
    values = torch.randint(0, ROWS, (total,), generator=generator)
    weights = torch.rand(total, generator=generator) + 0.5 if "weights" in case.ids else None
    if case.ids.startswith("int32"):
        values = values.int()
    if case.preprocess:
        values = values * 1000 + 7  # undone by ``prepared``
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, weights=weights, stride=n)


def prepared(batch: Any) -> Any:
    """What preprocess= does in cases that have it: raw ids become rows."""
    for name in ("x", "y"):
        keyed = field(batch, name)
        if keyed is not None:
            keyed._values = (keyed.values() - 7) // 1000
    return batch


class Model(nn.Module):
    """The case's model. It takes a batch of the case's type and returns (loss, scores)."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        with torch.random.fork_rng():
            torch.manual_seed(case.seed + 5)
            self.collections = nn.ModuleList([_collection(c, n) for n, c in enumerate(case.collections)])
        width = sum(len(c.tables_keys) for c in (_Width(case, look.collection) for look in case.lookups))
        if "alias" in case.habits:
            self.alias = nn.ModuleDict({"same": self.collections[0]})
        self.dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(case.precision, torch.float32)
        self.net: nn.Module | None = None
        if case.precision != "none":
            middle = nn.Dropout(0.0) if "dropout off" in case.habits else nn.Identity()
            self.net = nn.Sequential(nn.Linear(width * DIM + 3, 5), nn.Tanh(), middle, nn.Linear(5, 1)).to(self.dtype)
            if "unused" in case.habits:
                self.unused = nn.Linear(2, 2)
            if "frozen weight" in case.habits:
                self.net[0].bias.requires_grad_(False)
        if "buffer" in case.habits:
            self.register_buffer("average", torch.zeros(()))
        self.passes = 0

    def forward(self, batch: Any) -> Any:
        pooled = torch.cat([self._looked_up(batch, n) for n in range(len(self.case.lookups))], 1)
        inputs = torch.cat([pooled, field(batch, "dense")], 1)
        if self.net is None:
            score = inputs.sum(1)
        else:
            score = self.net(inputs.to(self.dtype)).squeeze(1).to(torch.promote_types(self.dtype, torch.float32))
        score = self._extras(batch, score)
        return self._loss(batch, score, pooled), score

    def _looked_up(self, batch: Any, n: int) -> Tensor:
        look = self.case.lookups[n]
        collection = self.collections[look.collection]
        if n and look.collection == 0 and "alias" in self.case.habits:
            collection = self.alias["same"]
        keyed = changed(field(batch, look.source), look.change, batch, self.case)
        found = collection(keyed)
        if not isinstance(found, dict):
            return found.values()
        pieces = []
        for jagged in found.values():
            sample = torch.repeat_interleave(torch.arange(len(jagged.lengths())), jagged.lengths())
            total = torch.zeros(len(jagged.lengths()), DIM)
            pieces.append(total.index_add(0, sample, jagged.values()))
        return torch.cat(pieces, 1)

    def _extras(self, batch: Any, score: Tensor) -> Tensor:
        if (text := field(batch, "string")) is not None:
            score = score + 0.1 * len(text)
        if (number := field(batch, "number")) is not None:
            score = score * number / 2
        if (shared := field(batch, "shared")) is not None:
            score = score + shared.mean()
        if (values := field(batch, "list")) is not None:
            score = score + torch.tensor(values)
        if (jagged := field(batch, "jagged")) is not None:
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
        each = torch.nn.functional.smooth_l1_loss(score, field(batch, "label").to(score.dtype), reduction="none")
        if (constant := field(batch, "constant")) is not None:
            each = each * constant
        if kind == "tokens":
            return Summed((each * weight).sum(), weight.sum())
        if kind in ("weighted", "weighted later"):
            return (each * weight).sum() / weight.sum()
        if kind == "masked":
            return each[weight > 0].mean()
        if weight is not None:
            each = each * weight
        if kind == "each":
            return each
        if kind == "sum":
            return each.sum()
        if kind == "penalty" and self.net is not None:
            return each.mean() + 0.01 * self.net[0].weight.square().sum() + 0.01 * pooled.square().sum(1).mean()
        if kind == "baseline":
            return (each * (score - score.mean()).detach()).mean()
        if kind == "in batch" or (kind == "in batch while training" and self.training):
            return torch.nn.functional.cross_entropy(score[:, None] * score[None, :], torch.arange(len(score)))
        return each.mean()


class _Width:
    def __init__(self, case: Case, number: int) -> None:
        self.tables_keys = [key for names, _ in case.collections[number].tables for key in names]


def _collection(spec: Collection, number: int) -> nn.Module:
    bags = spec.kind == "bags"
    config = EmbeddingBagConfig if bags else EmbeddingConfig
    tables = []
    for n, (names, pooling) in enumerate(spec.tables):
        how = {"pooling": PoolingType[pooling]} if bags else {}
        tables.append(
            config(num_embeddings=ROWS, embedding_dim=DIM, name=f"t{number}_{n}", feature_names=list(names), **how)
        )
    made = EmbeddingBagCollection(tables, is_weighted=spec.weighted) if bags else EmbeddingCollection(tables)
    if spec.frozen:
        next(iter(made.parameters())).requires_grad_(False)
    return made


def changed(keyed: KeyedJaggedTensor, how: str, batch: Any, case: Case) -> KeyedJaggedTensor:
    """The KeyedJaggedTensor that the model looks up instead of ``keyed``."""
    keys, values, lengths, weights = keyed.keys(), keyed.values(), keyed.lengths(), keyed.weights_or_none()
    if how == "permute":
        return keyed.permute(list(reversed(range(len(keys)))))
    if how == "split":
        return KeyedJaggedTensor.concat(keyed.split([1] * len(keys)))
    if how == "concat":
        return keyed if len(keys) == 1 else KeyedJaggedTensor.concat(list(reversed(keyed.split([1, len(keys) - 1]))))
    if how == "rebuild":
        return KeyedJaggedTensor(keys=keys, values=values.clone(), lengths=lengths.clone(), weights=weights)
    if how == "others" and field(batch, "y") is not None:
        other = field(batch, "y")
        return KeyedJaggedTensor(
            keys=keys, values=other.values(), lengths=other.lengths(), weights=other.weights_or_none()
        )
    if how == "hash":
        return KeyedJaggedTensor(keys=keys, values=(values * 5 + 1) % ROWS, lengths=lengths, weights=weights)
    if how == "in place":
        values.mul_(5).add_(1).remainder_(ROWS)
    if how == "lengths" and len(lengths) > 1 and len(values) == int(lengths.sum()):
        return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths.flip(0), weights=weights)
    return keyed
