"""A model's outputs of all micro-batches, in the order of the user's batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from nestpipe.data.batch import Jagged


def second_part(output: Any) -> Any:
    """What a model returns beside its loss: None, the second part of a pair, or a tuple of all others. Detached."""
    if not isinstance(output, tuple | list) or len(output) < 2:
        return None
    return detached(output[1] if len(output) == 2 else tuple(output[1:]))


def detached(value: Any) -> Any:
    """``value`` with every tensor in it detached."""
    return _mapped(_detached_leaf, value)


def merged(pieces: Sequence[Any], numbers: Sequence[Tensor]) -> Any:
    """The outputs of all micro-batches as one, samples in the order of their ``numbers`` (int64, one tensor a piece).

    What has one entry per sample (tensors, JaggedTensors, lists) is concatenated. Of anything else there is a list, one
    for each micro-batch.
    """
    if not pieces:
        return None
    order = torch.cat(list(numbers)).argsort(stable=True)
    return _merged(pieces, [len(n) for n in numbers], order, list)


def in_order(pieces: Sequence[Any], numbers: Sequence[Tensor]) -> list[Any]:
    """``pieces`` cut anew, so that their samples are in the order of their numbers from piece to piece."""
    every = torch.cat(list(numbers)) if numbers else torch.empty(0)
    if bool((every[1:] >= every[:-1]).all()):
        return list(pieces)
    sizes = [len(n) for n in numbers]
    orders = every.argsort(stable=True).split(sizes)
    return [_merged(pieces, sizes, order, itemgetter(m)) for m, order in enumerate(orders)]


def _merged(values: Sequence[Any], sizes: Sequence[int], order: Tensor, otherwise: Callable[[Any], Any]) -> Any:
    """The samples ``order`` of all pieces. ``otherwise``: what to make of values that cannot be merged."""
    first = values[0]
    if any(_kind(value) != _kind(first) for value in values):
        return otherwise(values)
    if isinstance(first, KeyedTensor):
        whole = _merged([value.values() for value in values], sizes, order, lambda parts: parts[0])
        return KeyedTensor(first.keys(), first.length_per_key(), whole, first.key_dim())
    if _per_sample(values, sizes):
        return _joined(values, order)
    if _parts(first) is None:
        return None if first is None else otherwise(values)
    if len({len(_parts(value) or ()) for value in values}) > 1:
        return otherwise(values)
    columns = zip(*(_parts(value) or () for value in values), strict=True)
    return _built(first, [_merged(column, sizes, order, otherwise) for column in columns])


def _per_sample(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether each value has one entry for each sample of its piece."""
    return all(_entries(value) == size for value, size in zip(values, sizes, strict=True))


def _entries(value: Any) -> int:
    if isinstance(value, Tensor):
        return len(value) if value.dim() else -1
    if isinstance(value, JaggedTensor):
        return len(value.lengths())
    plain = type(value) is list and not any(_holds_tensors(item) for item in value)
    return len(value) if plain else -1


def _joined(values: Sequence[Any], order: Tensor) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values))[order]
    if isinstance(first, JaggedTensor):
        counts = torch.cat([value.lengths() for value in values])
        flats = [[value.values() for value in values]]
        if all(value.weights_or_none() is not None for value in values):
            flats.append([value.weights() for value in values])
        ordered = [Jagged(torch.cat(flat), counts).select(order) for flat in flats]
        weights = ordered[1].flat if len(ordered) > 1 else None
        return JaggedTensor(values=ordered[0].flat, lengths=ordered[0].counts, weights=weights)
    every = [item for value in values for item in value]
    return [every[i] for i in order.tolist()]


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor | JaggedTensor | KeyedJaggedTensor | KeyedTensor) or any(
        _holds_tensors(part) for part in _parts(value) or ()
    )


def _detached_leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    weights = value.weights_or_none()
    weights = None if weights is None else weights.detach()
    if isinstance(value, KeyedJaggedTensor):
        return KeyedJaggedTensor(
            keys=value.keys(), values=value.values().detach(), lengths=value.lengths(), weights=weights
        )
    return JaggedTensor(values=value.values().detach(), lengths=value.lengths(), weights=weights)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Tensor | JaggedTensor | KeyedJaggedTensor):
        return function(value)
    if isinstance(value, KeyedTensor):
        return KeyedTensor(value.keys(), value.length_per_key(), function(value.values()), value.key_dim())
    parts = _parts(value)
    return value if parts is None else _built(value, [_mapped(function, part) for part in parts])


def _parts(value: Any) -> Sequence[Any] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name) for f in dataclasses.fields(value) if f.init]
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, tuple | list) else None


def _kind(value: Any) -> Any:
    """What must be equal for structures to have equal parts."""
    return type(value), list(value) if isinstance(value, Mapping) else None


def _built(like: Any, parts: Sequence[Any]) -> Any:
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        names = [f.name for f in dataclasses.fields(like) if f.init]
        return dataclasses.replace(like, **dict(zip(names, parts, strict=True)))
    if isinstance(like, Mapping):
        return dict(zip(like, parts, strict=True))
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
