"""Cuts batches of a TorchRec user's own type into micro-batches, and puts each together again in that type.

A batch may be a dataclass, named tuple, tuple, list or mapping, nested to any depth, or of a type for which the user
states a pair of functions. What it holds is that batch's own: nothing is taken from an earlier batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.adoption.keyed import (
    HandedOut,
    KeyedForm,
    cut_keyed,
    jagged_maker,
    keyed_of,
    stride,
    weights_place,
)
from nestpipe.adoption.structures import BatchError, OwnTypes, Rebuild, children, position
from nestpipe.data.batch import Batch, Jagged
from nestpipe.machine.versions import require_torchrec

require_torchrec()

from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor  # noqa: E402

_CONSTANTS = (type(None), str, bytes, int, float, complex, bool, torch.dtype, torch.device, torch.Size, np.generic)


@dataclass(frozen=True)
class Source:
    """What ids are read from: ``key`` of the KeyedJaggedTensor at ``path``, or the ids of another leaf (key None)."""

    path: str
    key: str | None = None

    def __str__(self) -> str:
        return f"batch{self.path}" if self.key is None else f"batch{self.path}[{self.key!r}]"

    @property
    def place(self) -> str:
        """Its name in ``Batch.extra``."""
        return self.path if self.key is None else f"{self.path}:{self.key}"


@dataclass
class Reads:
    """Which tables are looked up by which source.

    ``tables``: those that the model looked up in its first batch. ``by_key``: by key, all tables that have it; what a
    KeyedJaggedTensor that the first batch did not have is assumed to be looked up by. ``rows``: of each table.
    """

    by_key: Mapping[str, Sequence[str]]
    rows: Mapping[str, int]
    tables: dict[Source, dict[str, None]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def add(self, table: str, source: Source) -> None:
        self.tables.setdefault(source, {})[table] = None

    def of(self, source: Source, ids: Tensor) -> Sequence[str]:
        """The tables that ``source`` is looked up in."""
        if source.path in self.seen or source.key is None:
            return tuple(self.tables.get(source, ()))
        # Tables that do not have these rows cannot be meant.
        beyond = int(ids.max()) if len(ids) and _is_integer(ids) else 0
        return tuple(table for table in self.by_key.get(source.key, ()) if beyond < self.rows[table])


@dataclass(frozen=True)
class _Form:
    """A batch without its samples. ``leaves``: by path, what is needed to make the leaf from ``Batch.extra``."""

    rebuild: Rebuild
    leaves: Mapping[str, Any]
    first_id: int


class BatchFormat:
    """Cuts batches and puts them together. ``own_types``: by type, (take apart, put together).

    ``shared``: fields ("negatives", "meta.negatives", "[2]") whose tensors every micro-batch gets whole.
    """

    def __init__(self, own_types: OwnTypes | None = None, shared: Sequence[str] = ()) -> None:
        self._own_types = own_types or {}
        self._shared = {name if name[:1] in ".[" else f".{name}" for name in shared}

    def to_batch(self, batch: Any, first_id: int, reads: Reads) -> Batch:
        """``batch`` as a Batch whose samples are numbered from ``first_id``. All tensors are copied.

        Raises BatchError, which names the field, for whatever cannot be cut into samples.
        """
        rebuild, found = self._taken_apart(batch)
        samples = _samples(found, self._is_shared)
        extra: dict[str, Jagged | Tensor] = {}
        leaves = {path: self._leaf(path, value, samples, extra) for path, value in found}
        ids = {source: extra[source.place] for source in _sources(leaves, extra) if source.key is not None}
        ids |= {
            source: _ids(extra[source.path]) for source in reads.tables if source.key is None and source.path in extra
        }
        sparse: dict[str, Jagged] = {}
        features: dict[str, tuple[str, ...]] = {}
        for source, jagged in ids.items():
            assert isinstance(jagged, Jagged)
            for table in reads.of(source, jagged.flat):
                if not _is_integer(jagged.flat):
                    raise BatchError(f"{source} holds ids of type {jagged.flat.dtype}; ids must be integers")
                name = feature_name(table, source)
                sparse[name] = jagged if jagged.flat.dtype == torch.int64 else Jagged(jagged.flat.long(), jagged.counts)
                features[table] = (*features.get(table, ()), name)
        numbers = torch.arange(first_id, first_id + samples)
        return Batch(sparse, numbers, extra, reads=features, form=_Form(rebuild, leaves, first_id))

    def from_batch(self, part: Batch) -> tuple[Any, list[HandedOut]]:
        """The samples of ``part`` in a batch of the user's type, and the KeyedJaggedTensors in it.

        All tensors are copies, so what a model changes in place stays in the batch that it was given.
        """
        form: _Form = part.form
        handed: list[HandedOut] = []

        def value(path: str) -> Any:
            leaf = form.leaves[path]
            if isinstance(leaf, KeyedForm):
                handed.append(keyed_of(path, leaf, part))
                return handed[-1].keyed
            return leaf(part) if callable(leaf) else leaf

        return form.rebuild(value), handed

    def copied(self, batch: Any) -> Any:
        """A copy of ``batch`` that shares no tensor with it. Raises BatchError."""
        return self.from_batch(self.to_batch(batch, 0, Reads({}, {})))[0]

    def _taken_apart(self, batch: Any) -> tuple[Rebuild, list[tuple[str, Any]]]:
        """How to build such a batch from its leaves, and the leaves by path."""
        found: list[tuple[str, Any]] = []

        def visit(value: Any, path: str) -> Rebuild:
            taken = None if _is_leaf(value) else children(value, path, self._own_types)
            if taken is None:
                found.append((path, value))
                return lambda leaf: leaf(path)
            parts, build = taken
            made = [visit(part, path + step) for step, part in parts.items()]
            return lambda leaf: build([make(leaf) for make in made])

        try:
            return visit(batch, ""), found
        except (TypeError, ValueError) as error:
            raise BatchError(f"the batch cannot be taken apart: {error}") from error

    def _is_shared(self, path: str) -> bool:
        return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in self._shared)

    def _leaf(self, path: str, value: Any, samples: int, extra: dict[str, Jagged | Tensor]) -> Any:
        """Put what is per sample into ``extra``. Returns a constant, a KeyedForm or what makes the leaf of a part."""
        if isinstance(value, KeyedJaggedTensor):
            return cut_keyed(path, value, extra)
        if isinstance(value, JaggedTensor):
            weights = value.weights_or_none()
            lengths = value.lengths().to(torch.int64, copy=True)
            extra[path] = Jagged(value.values().clone(), lengths)
            if weights is not None:
                extra[weights_place(path)] = Jagged(weights.clone(), lengths)
            return jagged_maker(path, value.lengths().dtype, weights is not None)
        if isinstance(value, KeyedTensor):
            extra[path] = value.values().clone()
            keys, widths, dim = value.keys(), value.length_per_key(), value.key_dim()
            return lambda part: KeyedTensor(keys, widths, part.extra[path].clone(), dim)
        if isinstance(value, Tensor):
            if not value.dim() or self._is_shared(path):
                whole = value.clone()
                return lambda part: whole.clone()
            extra[path] = value.clone()
            return lambda part: part.extra[path].clone()
        if isinstance(value, list | tuple):  # of constants only: see _is_leaf
            whole_list = value
            if len(value) != samples or self._is_shared(path):
                return lambda part: whole_list
            make = list if type(value) is list else tuple
            return lambda part: make(whole_list[i] for i in position(part, part.form.first_id))
        return value


def _is_leaf(value: Any) -> bool:
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return bool(value) and all(isinstance(item, str | bytes | int | float | bool) for item in value)
    return isinstance(value, KeyedJaggedTensor | JaggedTensor | KeyedTensor | Tensor)


def _samples(found: list[tuple[str, Any]], is_shared: Callable[[str], bool]) -> int:
    """The number of samples of a batch. Raises BatchError for a leaf of another kind or with another number."""
    counts: dict[str, int] = {}
    for path, value in found:
        if isinstance(value, KeyedJaggedTensor):
            if is_shared(path):
                raise BatchError(
                    f"batch{path} is a KeyedJaggedTensor, whose ids belong to samples: it cannot be shared"
                )
            counts[path] = stride(path, value)
        elif isinstance(value, JaggedTensor):
            counts[path] = len(value.lengths())
        elif isinstance(value, KeyedTensor):
            counts[path] = len(value.values())
        elif isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_nested:
                raise BatchError(f"batch{path} is a {value.layout} tensor; a batch holds dense tensors")
            if value.dim() and not is_shared(path):
                counts[path] = len(value)
        elif not isinstance(value, (*_CONSTANTS, list, tuple)) and not hasattr(type(value), "__members__"):
            raise BatchError(
                f"batch{path} is a {type(value).__name__}; a batch is a dataclass, tuple or mapping of tensors, "
                "(Keyed)JaggedTensors and constants: state how to cut other types with own_types="
            )
    if not counts:
        raise BatchError("the batch holds no tensor, so the number of its samples is unknown")
    keyed = [n for path, n in counts.items() if any(p == path and isinstance(v, KeyedJaggedTensor) for p, v in found)]
    samples = keyed[0] if keyed else next(iter(counts.values()))
    for path, count in counts.items():
        if count != samples:
            raise BatchError(
                f"batch{path} has {count} rows, but the batch has {samples} samples: if every micro-batch needs it "
                f"whole, pass shared=('{path.lstrip('.')}',)"
            )
    return samples


def sources(part: Batch) -> dict[Source, Jagged]:
    """All ids in ``part`` that a collection might be asked for."""
    extra: Mapping[str, Any] = part.extra
    return {source: _ids(extra[source.place]) for source in _sources(part.form.leaves, extra)}


def _sources(leaves: Mapping[str, Any], extra: Mapping[str, Any]) -> Iterator[Source]:
    for path, leaf in leaves.items():
        if isinstance(leaf, KeyedForm):
            yield from (Source(path, key) for key in leaf.keys)
        elif path in extra and _holds_ids(extra[path]):
            yield Source(path)


def _holds_ids(leaf: Jagged | Tensor) -> bool:
    if isinstance(leaf, Jagged):
        return _is_integer(leaf.flat) and leaf.flat.dim() == 1
    return _is_integer(leaf) and leaf.dim() in (1, 2)


def _ids(leaf: Jagged | Tensor) -> Jagged:
    """A leaf as ids: a tensor [samples] has one for each sample, a tensor [samples, n] has n."""
    if isinstance(leaf, Jagged):
        return leaf
    return Jagged(leaf.flatten(), torch.full((len(leaf),), leaf[0].numel() if len(leaf) else 0, dtype=torch.int64))


def _is_integer(values: Tensor) -> bool:
    return not values.is_floating_point() and not values.is_complex() and values.dtype != torch.bool


def feature_name(table: str, source: Source) -> str:
    return f"{table}/{source.place}"
