"""What models do with ids before they look them up."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.fuzz.cases import ROWS, Collection
from tests.fuzz.data import field


def keyed_of(batch: Any, source: str, spec: Collection) -> KeyedJaggedTensor:
    """The ids of another field than a KeyedJaggedTensor, under every key that the collection reads."""
    keys = list(dict.fromkeys(spec.keys))
    if source == "jagged ids":
        values, lengths = field(batch, "jagged_ids").values(), field(batch, "jagged_ids").lengths()
    else:
        ids = field(batch, "dense_ids")
        values, lengths = ids.flatten(), torch.full((len(ids),), 2)
    return KeyedJaggedTensor(
        keys=keys, values=values.repeat(len(keys)), lengths=lengths.repeat(len(keys)), stride=len(lengths)
    )


def changed(keyed: KeyedJaggedTensor, how: str, batch: Any, spec: Collection) -> KeyedJaggedTensor:
    """The KeyedJaggedTensor that the model looks up instead of ``keyed``."""
    keys, values, lengths, weights = keyed.keys(), keyed.values(), keyed.lengths(), keyed.weights_or_none()
    if how == "permute":
        return keyed.permute(list(reversed(range(len(keys)))))
    if how == "subset":
        return keyed.permute([keys.index(key) for key in dict.fromkeys(spec.keys)])
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
    if how in ("hash", "rolled"):
        other = (values * 5 + 1) % ROWS if how == "hash" else values.roll(1)
        return KeyedJaggedTensor(keys=keys, values=other, lengths=lengths, weights=weights)
    if how == "in place":
        values.mul_(5).add_(1).remainder_(ROWS)
    if how == "lengths" and len(lengths) > 1 and len(values) == int(lengths.sum()):
        return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths.flip(0), weights=weights)
    if how == "truncated":  # the first id of each sample only
        offsets, few = keyed.offsets()[:-1], lengths.clamp(max=1)
        first = offsets[lengths > 0].long()
        return KeyedJaggedTensor(
            keys=keys, values=values[first], lengths=few, weights=None if weights is None else weights[first]
        )
    return keyed
