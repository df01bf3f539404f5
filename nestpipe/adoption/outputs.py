"""A model's outputs of all micro-batches, in the order of the user's batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor


def second_part(output: Any) -> Any:
    """What a model returns beside its loss: None, the second part of a pair, or a tuple of all others. Detached."""
    if not isinstance(output, tuple | list) or len(output) < 2:
        return None
    return detached(output[1] if len(output) == 2 else tuple(output[1:]))


def detached(value: Any) -> Any:
    """``value`` with every tensor in it detached."""
    return _mapped(lambda tensor: tensor.detach(), value)


def merged(pieces: Sequence[Any], numbers: Sequence[Tensor]) -> Any:
    """The outputs of all micro-batches as one, samples in the order of their ``numbers`` (int64, one tensor a piece).

    Tensors with a row per sample are concatenated. Of anything else there is a list, one for each micro-batch.
    """
    if not pieces:
        return None
    order = torch.cat(list(numbers)).argsort(stable=True)
    return _merged(pieces, [len(n) for n in numbers], order)


def in_order(pieces: Sequence[Any], numbers: Sequence[Tensor]) -> list[Any]:
    """``pieces`` cut anew, so that their samples are in the order of their numbers from piece to piece."""
    every = torch.cat(list(numbers)) if numbers else torch.empty(0)
    if bool((every[1:] >= every[:-1]).all()):
        return list(pieces)
    order = every.argsort(stable=True)
    sizes = [len(n) for n in numbers]
    whole = [_Rows(part, sizes) for part in _leaves(pieces)]
    ordered = [rows.split(order) for rows in whole]
    return [_filled(piece, iter([parts[m] for parts in ordered])) for m, piece in enumerate(pieces)]


class _Rows:
    """One leaf of all pieces."""

    def __init__(self, values: Sequence[Any], sizes: Sequence[int]) -> None:
        self.values, self.sizes = values, sizes

    def split(self, order: Tensor) -> Sequence[Any]:
        if not _per_sample(self.values, self.sizes):
            return self.values
        return torch.cat(list(self.values))[order].split(list(self.sizes))


def _per_sample(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    return all(isinstance(v, Tensor) and v.dim() and len(v) == n for v, n in zip(values, sizes, strict=True))


def _merged(values: Sequence[Any], sizes: Sequence[int], order: Tensor) -> Any:
    first = values[0]
    if _per_sample(values, sizes):
        return torch.cat(list(values))[order]
    if isinstance(first, KeyedTensor):
        whole = _merged([value.values() for value in values], sizes, order)
        return KeyedTensor(first.keys(), first.length_per_key(), whole, first.key_dim())
    if (parts := _parts(first)) is not None:
        if any(len(_parts(value) or ()) != len(parts) for value in values):
            return list(values)
        columns = [_merged(column, sizes, order) for column in zip(*(_parts(v) or () for v in values), strict=True)]
        return _built(first, columns)
    if first is None:
        return None
    return list(values)


def _leaves(pieces: Sequence[Any]) -> list[list[Any]]:
    """The leaves of each piece, as one list for each leaf."""
    found: list[list[Any]] = []
    for piece in pieces:
        mine: list[Any] = []
        _mapped(lambda tensor, mine=mine: mine.append(tensor) or tensor, piece)  # type: ignore[misc]
        found.append(mine)
    return [list(column) for column in zip(*found, strict=True)]


def _filled(piece: Any, values: Any) -> Any:
    return _mapped(lambda tensor: next(values), piece)


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
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


def _built(like: Any, parts: Sequence[Any]) -> Any:
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        names = [f.name for f in dataclasses.fields(like) if f.init]
        return dataclasses.replace(like, **dict(zip(names, parts, strict=True)))
    if isinstance(like, Mapping):
        return dict(zip(like, parts, strict=True))
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
