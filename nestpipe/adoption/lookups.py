"""Embedding collections that look rows up for a pipeline: adopted in place, so every path and alias leads to them.

Rows belong to the ids that a collection is called with. Which rows those are is found by comparing the ids and
lengths with those of the batch, exactly. Equal ids in one table are equal rows, whatever holds them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nestpipe.adoption.batches import BatchError, HandedOut, Reads, Source, feature_name, sources
from nestpipe.adoption.collections import KINDS, Slot, configs_of, slots_of, tables_name, tables_of
from nestpipe.data.batch import Batch, Jagged
from nestpipe.embedding.pooling import pool
from nestpipe.machine.versions import require_torchrec

require_torchrec()

from torchrec.modules.embedding_modules import (  # noqa: E402
    EmbeddingBagCollection,
    EmbeddingCollection,
    process_pooled_embeddings,
    reorder_inverse_indices,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor  # noqa: E402
from torchrec.sparse.tensor_dict import maybe_td_to_kjt  # noqa: E402


class Supplier(Protocol):
    """Gives the rows of one (micro-)batch."""

    def rows(self, collection: str, slots: Sequence[Slot], asked: Any) -> list[Tensor]:
        """float32 [ids, dim] for each slot, for the KeyedJaggedTensor ``asked``. Raises BatchError."""
        ...


class Lookups:
    """What the adopted collections of a model get their rows from; nothing between micro-batches."""

    def __init__(self) -> None:
        self._supplier: Supplier | None = None

    @contextmanager
    def using(self, supplier: Supplier) -> Iterator[None]:
        before, self._supplier = self._supplier, supplier
        try:
            yield
        finally:
            self._supplier = before

    def rows(self, collection: str, slots: Sequence[Slot], asked: Any) -> list[Tensor]:
        if self._supplier is None:
            raise RuntimeError(
                "this model is trained by a NestPipeline, which has its embedding rows: call pipeline.progress, or "
                "pipeline.export() for a model to evaluate or save. A collection cannot be "
                "inside an activation checkpoint"
            )
        return self._supplier.rows(collection, slots, asked)


@dataclass(frozen=True)
class Adopted:
    """What an adopted collection keeps: its ``path``, its outputs, its ``tables`` (a ModuleDict) and its class before.

    Copies of a model share it, since only the pipeline has rows.
    """

    path: str
    slots: tuple[Slot, ...]
    lookups: Lookups
    tables: Any
    before: type

    def __deepcopy__(self, memo: Any) -> Adopted:
        return self

    def taken(self) -> Any:
        raise RuntimeError(
            f"the tables of '{self.path}' are trained by a NestPipeline and are not in the model: see "
            "pipeline.trainer.table(name) and pipeline.export()"
        )


class AdoptedBags(EmbeddingBagCollection):
    """KeyedJaggedTensor -> pooled KeyedTensor."""

    adopted: Adopted

    @property
    def embedding_bags(self) -> Any:
        return self.adopted.taken()

    def forward(self, features: Any) -> Any:
        asked = maybe_td_to_kjt(features, None)
        slots = self.adopted.slots
        rows = self.adopted.lookups.rows(self.adopted.path, slots, asked)
        if self._is_weighted and asked.weights_or_none() is None:
            keys = ", ".join(slot.key for slot in slots)
            raise ValueError(
                f"the embedding bags of {keys} are weighted, but the batch's KeyedJaggedTensor has no weights"
            )
        ids = _by_key(asked)
        pooled = [
            pool(found, ids[slot.key].lengths(), slot.pooling, ids[slot.key].weights() if self._is_weighted else None)
            for slot, found in zip(slots, rows, strict=True)
        ]
        inverse = reorder_inverse_indices(asked.inverse_indices_or_none(), [slot.key for slot in slots])
        return KeyedTensor(
            keys=[slot.name for slot in slots],
            length_per_key=self._lengths_per_embedding,
            values=process_pooled_embeddings(pooled, inverse),
        )


class AdoptedSequences(EmbeddingCollection):
    """KeyedJaggedTensor -> JaggedTensors of rows by name."""

    adopted: Adopted

    @property
    def embeddings(self) -> Any:
        return self.adopted.taken()

    def forward(self, features: Any) -> Any:
        asked = maybe_td_to_kjt(features, None)
        slots = self.adopted.slots
        rows = self.adopted.lookups.rows(self.adopted.path, slots, asked)
        ids = _by_key(asked)
        return {
            slot.name: JaggedTensor(
                values=found.clone(),  # the model may change it in place, and look the same ids up again
                lengths=ids[slot.key].lengths(),
                weights=ids[slot.key].values() if self._need_indices else None,
            )
            for slot, found in zip(slots, rows, strict=True)
        }


_ADOPTED: Mapping[type, type] = {EmbeddingBagCollection: AdoptedBags, EmbeddingCollection: AdoptedSequences}


@functools.cache
def _adopted_class(before: type, adopted: type) -> type:
    """``adopted``, with what a user's subclass of a collection adds to it."""
    return adopted if before in KINDS else type(before.__name__, (adopted, before), {})


def adopt(collections: Mapping[str, Any], lookups: Lookups) -> None:
    """Make ``collections`` (by path) get their rows from ``lookups``, and take their tables out of them."""
    for path, collection in collections.items():
        before = type(collection)
        kind = next(kind for kind in KINDS if isinstance(collection, kind))
        collection.adopted = Adopted(path, slots_of(collection), lookups, tables_of(collection), before)
        del collection._modules[tables_name(collection)]
        collection.__class__ = _adopted_class(before, _ADOPTED[kind])  # type: ignore[arg-type]


def adopted_collections(model: nn.Module) -> dict[str, Any]:
    """The adopted collections of ``model``, each once, by path."""
    return {path: m for path, m in model.named_modules() if isinstance(m, AdoptedBags | AdoptedSequences)}


def give_back(collection: Any, tables: Any) -> None:
    """Undo ``adopt`` for one collection, with ``tables`` (a ModuleDict) as its tables."""
    name = tables_name(collection)
    collection.__class__ = collection.adopted.before
    del collection.adopted
    collection._modules[name] = tables


class FromTables:
    """Rows of whole ``tables`` ([rows, dim] by name; on the meta device: made up) for the ids of ``part``.

    ``reads``, if given, records which source each table was looked up by.
    """

    def __init__(self, tables: Mapping[str, Tensor], part: Batch, handed: Sequence[HandedOut], reads: Reads | None):
        self._tables = tables
        self._handed = handed
        self._reads = reads
        self._sources = sources(part)
        self.handed_out: list[tuple[str, Tensor, Tensor]] = []  # table, ids, rows: leaves of the pass's graph

    def rows(self, collection: str, slots: Sequence[Slot], asked: Any) -> list[Tensor]:
        path = _untouched_path(self._handed, asked)
        ids = _by_key(asked)
        found = []
        for slot in slots:
            jagged = _asked(collection, slot, ids)
            if self._reads is not None:
                self._record(collection, slot, path, jagged)
            found.append(self._row_values(slot.table, jagged.flat))
        return found

    def _record(self, collection: str, slot: Slot, path: str | None, asked: Jagged) -> None:
        assert self._reads is not None
        if path is not None:
            self._reads.add(slot.table, Source(path, slot.key))
            return
        equal = [source for source, jagged in self._sources.items() if _equal(jagged, asked)]
        named = [source for source in equal if source.key == slot.key]
        if not equal:
            raise BatchError(
                f"'{collection}' looks up key '{slot.key}' with ids that are not those of the batch, for which rows "
                "are fetched ahead: make such ids (hashed, filtered, drawn) in the data loader, or pass preprocess="
            )
        for source in named or equal:
            self._reads.add(slot.table, source)

    def _row_values(self, name: str, ids: Tensor) -> Tensor:
        table = self._tables[name]
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < len(table)):
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise BatchError(f"the model looks up id {bad} in table '{name}', which has rows 0..{len(table) - 1}")
        if not table.is_meta:
            rows = table.detach()[ids]
        else:
            spread = len(table) ** -0.5  # torchrec's default range
            column = torch.arange(table.shape[1])
            rows = (((ids[:, None] * 7919 + column * 104729) % 2003).float() / 1001 - 1) * spread
        self.handed_out.append((name, ids, rows.requires_grad_(table.requires_grad)))
        return rows


class FromEngine:
    """Rows that the engine has fetched for ``part``: by feature, in the order of its ids."""

    def __init__(self, rows: Mapping[str, Jagged], part: Batch, handed: Sequence[HandedOut]):
        self._rows = rows
        self._part = part
        self._handed = handed

    def select(self, part: Batch, handed: Sequence[HandedOut], index: Tensor) -> FromEngine:
        """The same for the samples ``index`` (int64 [k]); ``part`` is the micro-batch of only these."""
        rows = {name: Jagged(jagged.flat.detach(), jagged.counts).select(index) for name, jagged in self._rows.items()}
        for name, jagged in rows.items():
            jagged.flat.requires_grad_(self._rows[name].flat.requires_grad)
        return FromEngine(rows, part, handed)

    def rows(self, collection: str, slots: Sequence[Slot], asked: Any) -> list[Tensor]:
        path = _untouched_path(self._handed, asked)
        if path is not None:
            names = [feature_name(slot.table, Source(path, slot.key)) for slot in slots]
            if all(name in self._rows for name in names):
                return [self._rows[name].flat for name in names]
        ids = _by_key(asked)
        return [self._compared(collection, slot, _asked(collection, slot, ids)) for slot in slots]

    def _compared(self, collection: str, slot: Slot, asked: Jagged) -> Tensor:
        for name in (self._part.reads or {}).get(slot.table, ()):
            if _equal(self._part.sparse[name], asked):
                return self._rows[name].flat
        if any(_equal(jagged, asked) for jagged in sources(self._part).values()):
            raise BatchError(
                f"'{collection}' looks up key '{slot.key}' with ids of the batch that it did not look up in the first "
                "batch, so no rows were fetched for them: let the model look up the same fields in every batch"
            )
        raise BatchError(
            f"'{collection}' looks up key '{slot.key}' with ids that are not those of the batch, for which rows are "
            "fetched ahead: make such ids (hashed, filtered, drawn) in the data loader, or pass preprocess="
        )


def _untouched_path(handed: Sequence[HandedOut], asked: Any) -> str | None:
    """The place of ``asked`` in the batch, if it is a KeyedJaggedTensor of the batch that the model has not changed."""
    return next((one.path for one in handed if one.keyed is asked and one.untouched()), None)


def _by_key(asked: Any) -> Mapping[str, Any]:
    if not len(asked.lengths()):  # no samples: torchrec cannot split those by key
        none = JaggedTensor(values=asked.values(), lengths=asked.lengths(), weights=asked.weights_or_none())
        return dict.fromkeys(asked.keys(), none)
    return asked.to_dict()


def _asked(collection: str, slot: Slot, ids: Mapping[str, Any]) -> Jagged:
    if slot.key not in ids:
        raise BatchError(f"'{collection}' was called without key '{slot.key}', which table '{slot.table}' reads")
    values = ids[slot.key].values()
    if values.is_floating_point():
        raise BatchError(
            f"'{collection}' was called with ids of type {values.dtype} for key '{slot.key}'; use integers"
        )
    return Jagged(values.long(), ids[slot.key].lengths().long())


def _equal(one: Jagged, other: Jagged) -> bool:
    return (
        one.flat.shape == other.flat.shape
        and one.counts.shape == other.counts.shape
        and torch.equal(one.flat.long(), other.flat)
        and torch.equal(one.counts, other.counts)
    )


def tables_read_by(collections: Mapping[str, Any]) -> Reads:
    """What is known of a model's lookups before it has run."""
    by_key: dict[str, list[str]] = {}
    rows: dict[str, int] = {}
    for collection in collections.values():
        for slot in slots_of(collection):
            by_key.setdefault(slot.key, []).append(slot.table)
        rows |= {config.name: config.num_embeddings for config in configs_of(collection)}
    return Reads(by_key, rows)
