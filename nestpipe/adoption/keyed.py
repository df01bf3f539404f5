"""Cuts (Keyed)JaggedTensors into samples and puts them together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nestpipe.adoption.structures import BatchError
from nestpipe.data.batch import Batch, Jagged
from nestpipe.machine.versions import require_torchrec

require_torchrec()

from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor  # noqa: E402

#: Begins the place of weights in ``Batch.extra``. No path begins like it, and keys may hold any character.
_WEIGHTS = "weights of "


@dataclass(frozen=True)
class KeyedForm:
    """What a KeyedJaggedTensor leaf holds in addition to its values."""

    keys: tuple[str, ...]
    lengths_dtype: torch.dtype
    values_dtype: torch.dtype
    weighted: bool


@dataclass(frozen=True)
class HandedOut:
    """A KeyedJaggedTensor that a model gets, with copies of what it holds that the model never sees."""

    keyed: Any
    path: str
    values: Tensor
    lengths: Tensor

    def untouched(self) -> bool:
        return torch.equal(self.keyed.values(), self.values) and torch.equal(self.keyed.lengths(), self.lengths)


def stride(path: str, keyed: Any) -> int:
    """The number of samples of ``keyed``. Raises BatchError if keys have different ones."""
    inverse = keyed.inverse_indices_or_none()
    if inverse is not None:
        return inverse[1].shape[1]
    if keyed.variable_stride_per_key():
        raise BatchError(
            f"batch{path} has a different number of samples per key (variable batch) and no inverse_indices that say "
            "which sample has which: give it one stride, or inverse_indices"
        )
    return keyed.stride()


def cut_keyed(path: str, keyed: Any, extra: dict[str, Jagged | Tensor]) -> KeyedForm:
    """Puts the samples of ``keyed`` into ``extra``, by key; inverse indices are applied. Raises BatchError."""
    keys = tuple(keyed.keys())
    if len(set(keys)) < len(keys):
        raise BatchError(f"batch{path} has a key twice: {', '.join(keys)}")
    weights = keyed.weights_or_none()
    inverse = keyed.inverse_indices_or_none()
    strides = keyed.stride_per_key() if keyed.variable_stride_per_key() else [keyed.stride()] * len(keys)
    values, lengths = keyed.values().clone(), keyed.lengths().to(torch.int64, copy=True).split(strides)
    weights = None if weights is None else weights.clone()
    counts = torch.stack([part.sum() for part in lengths]).tolist() if keys else []
    if sum(counts) != len(values):
        raise BatchError(f"batch{path} has {len(values)} values, but its lengths sum to {sum(counts)}")
    order = {} if inverse is None else dict(zip(inverse[0], inverse[1].long(), strict=True))
    for what, flat in (("", values), (_WEIGHTS, weights)):
        if flat is None:
            continue
        for key, piece, length in zip(keys, flat.split(counts), lengths, strict=True):
            jagged = Jagged(piece, length)
            extra[f"{what}{path}:{key}"] = jagged.select(order[key]) if key in order else jagged
    return KeyedForm(keys, keyed.lengths().dtype, values.dtype, weights is not None)


def keyed_of(path: str, leaf: KeyedForm, part: Batch) -> HandedOut:
    """The KeyedJaggedTensor at ``path`` with the samples of ``part``."""
    pieces: list[Any] = [part.extra[f"{path}:{key}"] for key in leaf.keys]
    weights: list[Any] = [part.extra[f"{_WEIGHTS}{path}:{key}"] for key in leaf.keys] if leaf.weighted else []
    if not pieces:
        empty = torch.empty(0, dtype=leaf.values_dtype)
        keyed = KeyedJaggedTensor(keys=[], values=empty, lengths=torch.empty(0, dtype=leaf.lengths_dtype))
        return HandedOut(keyed, path, empty, keyed.lengths())
    values = torch.cat([piece.flat for piece in pieces])
    lengths = torch.cat([piece.counts for piece in pieces]).to(leaf.lengths_dtype)
    keyed = KeyedJaggedTensor(
        keys=list(leaf.keys),
        values=values,
        lengths=lengths,
        weights=torch.cat([piece.flat for piece in weights]) if weights else None,
        stride=len(part),
    )
    return HandedOut(keyed, path, values.clone(), lengths.clone())


def weights_place(path: str) -> str:
    """The place in ``Batch.extra`` of the weights of the JaggedTensor at ``path``."""
    return f"{_WEIGHTS}{path}"


def jagged_maker(path: str, dtype: torch.dtype, weighted: bool) -> Callable[[Batch], Any]:
    """Makes the JaggedTensor at ``path`` of a part of its batch."""

    def make(part: Batch) -> Any:
        extra: Mapping[str, Any] = part.extra
        weights = extra[weights_place(path)].flat.clone() if weighted else None
        lengths = extra[path].counts.to(dtype, copy=True)
        return JaggedTensor(values=extra[path].flat.clone(), lengths=lengths, weights=weights)

    return make
