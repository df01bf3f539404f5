"""Drop-in replacements for torchrec's embedding collections in a model that the engine runs, and their tables.

A key that several tables read becomes several features of the engine, one per table, named ``table/key``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.data.tables import TableConfig
from nestpipe.embedding.pooling import pool
from nestpipe.machine.versions import require_torchrec
from nestpipe.trainer import SparseOptimizer

require_torchrec()

from torchrec.modules.embedding_modules import (  # noqa: E402
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor  # noqa: E402


class HandedRows(nn.Module):
    """The rows that the engine hands out for a micro-batch, by feature.

    ``closed`` is True between micro-batches: a call of the model then raises RuntimeError that says what to do.
    """

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source = source
        self.closed = False

    def forward(self) -> Mapping[str, Any]:
        if self.closed:
            raise RuntimeError(
                "this model is trained by a NestPipeline, which has its embedding rows: call pipeline.progress, or "
                "pipeline.export() for a model to evaluate or save"
            )
        return self.source({})


@dataclass(frozen=True)
class _Slot:
    """One output of a collection: the engine's ``feature``, the KeyedJaggedTensor's ``key``, the output's ``name``."""

    feature: str
    key: str
    name: str
    pooling: str


def find_collections(model: nn.Module) -> dict[str, nn.Module]:
    """The embedding collections of ``model`` by path."""
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    return {path: module for path, module in model.named_modules() if isinstance(module, kinds)}


def table_configs(collections: Mapping[str, nn.Module]) -> tuple[TableConfig, ...]:
    """All tables. Raises ValueError for unequal dims, rows other than float32, equal names."""
    tables: list[TableConfig] = []
    for path, collection in collections.items():
        for config in _configs(collection):
            if config.data_type.name != "FP32":
                raise ValueError(f"table '{config.name}' of {path} is {config.data_type.name}; the engine needs FP32")
            if config.name in (table.name for table in tables):
                raise ValueError(f"two collections have a table '{config.name}'; give it another name in {path}")
            features = tuple(f"{config.name}/{key}" for key in config.feature_names)
            scale = config.num_embeddings**-0.5  # torchrec's default range
            tables.append(TableConfig(config.name, config.num_embeddings, config.embedding_dim, features, scale))
    if len({table.dim for table in tables}) > 1:
        dims = ", ".join(f"{table.name} {table.dim}" for table in tables)
        raise ValueError(
            f"tables of unequal dims cannot share the dual buffer yet: {dims}; give all of them the largest "
            "embedding_dim, and narrow the output with a Linear if the model needs it"
        )
    return tuple(tables)


def read_keys(collections: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """The engine's features for each key that a table reads."""
    reads: dict[str, list[str]] = {}
    for collection in collections.values():
        for slot in _slots(collection):
            reads.setdefault(slot.key, []).append(slot.feature)
    return reads


def whole_tables(collections: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights [rows, dim] by table, for the tables that have values (those not on the meta device)."""
    found: dict[str, Tensor] = {}
    for collection in collections.values():
        found |= {name: t.weight.detach() for name, t in tables_of(collection).items() if not t.weight.is_meta}
    return found


def tables_of(collection: Any) -> Any:
    """A ModuleDict by table; each module has a ``weight`` [rows, dim]."""
    return collection.embedding_bags if hasattr(collection, "embedding_bags") else collection.embeddings


def stated_optimizer(collections: Mapping[str, nn.Module]) -> SparseOptimizer:
    """The rule that ``apply_optimizer_in_backward`` set. Raises ValueError for none, several, or an unknown one."""
    stated = set()
    for collection in collections.values():
        for parameter in collection.parameters():
            classes = getattr(parameter, "_optimizer_classes", [])
            options = getattr(parameter, "_optimizer_kwargs", [{}])
            names = tuple(c.__name__ for c in classes)
            stated.add((names, *(tuple(sorted(o.items())) for o in options)))
    if len(stated) != 1 or len(next(iter(stated))[0]) != 1:
        raise ValueError(
            "pass sparse_optimizer=SparseOptimizer(...), or use one apply_optimizer_in_backward for all tables"
        )
    (name,), options = next(iter(stated))
    rules = {"SGD": "sgd", "RowWiseAdagrad": "rowwise_adagrad"}
    known = {key: value for key, value in options if key in ("lr", "eps")}
    if name not in rules or len(known) < len(options):
        raise ValueError(
            f"the tables' optimizer is {name}({dict(options)}); the engine has only {', '.join(rules)} with lr and eps"
        )
    defaults = {"SGD": {"lr": 1e-3}, "RowWiseAdagrad": {"lr": 1e-2, "eps": 1e-10}}[name]
    return SparseOptimizer(rules[name], **{**defaults, **known})


def drop_in(path: str, collection: nn.Module, rows: HandedRows) -> nn.Module:
    """The replacement for ``collection``."""
    return BagDropIn(collection, rows) if hasattr(collection, "embedding_bags") else SequenceDropIn(collection, rows)


class _DropIn(nn.Module):
    def __init__(self, collection: Any, rows: HandedRows) -> None:
        super().__init__()
        self._slots = _slots(collection)
        self._configs = _configs(collection)
        self._rows = rows

    def _arrived(self, features: Any) -> list[tuple[_Slot, Any, Any]]:
        """For each output: its slot, the rows handed out, and the keys that the model looks up."""
        handed, asked = self._rows(), features.to_dict()
        found = [(slot, handed[slot.feature], asked[slot.key]) for slot in self._slots]
        for slot, jagged, keys in found:
            if len(jagged.values()) != len(keys.values()):
                raise ValueError(
                    f"the model changes the keys of '{slot.key}' before its embedding collection, but rows were "
                    "fetched for the batch's keys: change them in the data loader"
                )
        return found


class BagDropIn(_DropIn):
    """Replaces an EmbeddingBagCollection: KeyedJaggedTensor -> pooled KeyedTensor."""

    def __init__(self, collection: Any, rows: HandedRows) -> None:
        super().__init__(collection, rows)
        self._is_weighted = collection.is_weighted()

    def embedding_bag_configs(self) -> Sequence[Any]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted

    def forward(self, features: Any) -> Any:
        arrived = self._arrived(features)
        if self._is_weighted and features.weights_or_none() is None:
            keys = ", ".join(slot.key for slot in self._slots)
            raise ValueError(
                f"the embedding bags of {keys} are weighted, but the batch's KeyedJaggedTensor has no weights"
            )
        pooled = [
            pool(rows.values(), rows.lengths(), slot.pooling, asked.weights() if self._is_weighted else None)
            for slot, rows, asked in arrived
        ]
        return KeyedTensor(
            keys=[slot.name for slot in self._slots],
            length_per_key=[value.shape[1] for value in pooled],
            values=torch.cat(pooled, dim=1),
        )


class SequenceDropIn(_DropIn):
    """Replaces an EmbeddingCollection: KeyedJaggedTensor -> JaggedTensors of rows by name."""

    def embedding_configs(self) -> Sequence[Any]:
        return self._configs

    def forward(self, features: Any) -> dict[str, Any]:
        return {
            slot.name: JaggedTensor(values=rows.values(), lengths=asked.lengths(), weights=asked.weights_or_none())
            for slot, rows, asked in self._arrived(features)
        }


def _configs(collection: Any) -> list[Any]:
    bags = hasattr(collection, "embedding_bag_configs")
    return list(collection.embedding_bag_configs() if bags else collection.embedding_configs())


def _slots(collection: Any) -> list[_Slot]:
    configs = _configs(collection)
    return [
        _Slot(f"{config.name}/{key}", key, name, config.pooling.name.lower() if hasattr(config, "pooling") else "sum")
        for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
        for key, name in zip(config.feature_names, names, strict=True)
    ]
