"""Converts batches of a TorchRec user's own type to ``Batch`` and back, so that any type can be cut into micro-batches.

A batch may be a dataclass, named tuple, tuple, list or mapping, nested to any depth. Its leaves are tensors with one
row per sample, ``KeyedJaggedTensor``s, ``JaggedTensor``s, and constants (None, strings, numbers) that are the same in
every batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.keyed_jagged import keyed_jagged_tensor

_CONSTANTS = (type(None), str, int, float, bool)


class BatchError(ValueError):
    """A user's batch cannot be cut into micro-batches; the message names the field."""


@dataclass(frozen=True)
class ForeignBatches:
    """How batches of one type are taken apart and put together.

    ``reads``: for each key of a KeyedJaggedTensor, the engine's features that read it (one for each table that
    reads the key). ``example``: the first batch, whose structure all others share.
    """

    reads: Mapping[str, Sequence[str]]
    example: Any

    def to_batch(self, batch: Any, first_id: int) -> Batch:
        """``batch`` as a Batch whose samples are numbered from ``first_id``. Raises BatchError."""
        sparse: dict[str, Jagged] = {}
        extra: dict[str, Jagged | Tensor] = {}
        samples: dict[str, int] = {}
        for path, value in _leaves(batch):
            if _is_keyed(value):
                samples[path] = value.stride()
                for key, jagged, weights in _features(path, value):
                    extra[f"{path}:{key}"] = jagged
                    sparse |= {feature: jagged for feature in self.reads.get(key, ())}
                    if weights is not None:
                        extra[f"{path}:{key}:weights"] = weights
            elif isinstance(value, Tensor):
                if not value.dim():
                    raise BatchError(f"batch{path} is a tensor without a row per sample; micro-batches cannot split it")
                samples[path] = len(value)
                extra[path] = value
            elif _is_jagged(value):
                samples[path] = len(value.lengths())
                extra[path] = Jagged(value.values(), value.lengths().long())
            elif not isinstance(value, _CONSTANTS):
                raise BatchError(
                    f"batch{path} is a {type(value).__name__}; it may hold tensors, (Keyed)JaggedTensors, constants"
                )
        if len(set(samples.values())) != 1:
            found = ", ".join(f"batch{path} {n}" for path, n in samples.items())
            raise BatchError(f"the parts of a batch differ in their number of samples: {found or 'no tensor'}")
        if missing := [key for key, features in self.reads.items() if any(f not in sparse for f in features)]:
            raise BatchError(f"no KeyedJaggedTensor of the batch has the key '{missing[0]}', which a table reads")
        count = next(iter(samples.values()))
        return Batch(sparse, torch.arange(first_id, first_id + count), extra)

    def from_batch(self, part: Batch) -> Any:
        """The samples of ``part`` in a batch of the user's type."""
        extra: Mapping[str, Any] = part.extra

        def leaf(path: str, value: Any) -> Any:
            if _is_keyed(value):
                keys = list(value.keys())
                weighted = f"{path}:{keys[0]}:weights" in extra
                return keyed_jagged_tensor(
                    {key: extra[f"{path}:{key}"] for key in keys},
                    {key: extra[f"{path}:{key}:weights"] for key in keys} if weighted else None,
                )
            if isinstance(value, Tensor):
                return extra[path]
            if _is_jagged(value):
                return type(value)(values=extra[path].values(), lengths=extra[path].lengths())
            return value

        return _rebuilt(self.example, leaf)

    def batches(self, source: Iterator[Any]) -> Iterator[Batch]:
        """Convert each batch of ``source``; samples are numbered from 0 across all of them."""
        first_id = 0
        for batch in source:
            converted = self.to_batch(batch, first_id)
            first_id += len(converted)
            yield converted


def _features(path: str, keyed: Any) -> Iterator[tuple[str, Jagged, Jagged | None]]:
    if keyed.variable_stride_per_key():
        raise BatchError(f"batch{path} has a different number of samples per key (variable batch); give it one stride")
    for key, jagged in keyed.to_dict().items():
        lengths = jagged.lengths().long()
        weights = jagged.weights_or_none()
        yield key, Jagged(jagged.values().long(), lengths), None if weights is None else Jagged(weights, lengths)


def _is_keyed(value: Any) -> bool:
    return hasattr(value, "stride") and hasattr(value, "to_dict") and not isinstance(value, Tensor)


def _is_jagged(value: Any) -> bool:
    return not isinstance(value, Tensor) and all(hasattr(value, name) for name in ("values", "lengths", "offsets"))


def _children(value: Any) -> Mapping[str, Any] | None:
    """The parts of a structure, keyed by the text that accesses them; None for a leaf."""
    if _is_keyed(value) or _is_jagged(value) or isinstance(value, Tensor):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{field.name}": getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Mapping):
        return {f"[{key!r}]": part for key, part in value.items()}
    if isinstance(value, tuple | list):
        return {f"[{n}]": part for n, part in enumerate(value)}
    return None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    children = _children(value)
    if children is None:
        yield path, value
    else:
        for step, part in children.items():
            yield from _leaves(part, path + step)


def _rebuilt(value: Any, leaf: Callable[[str, Any], Any], path: str = "") -> Any:
    children = _children(value)
    if children is None:
        return leaf(path, value)
    parts = [_rebuilt(part, leaf, path + step) for step, part in children.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **dict(zip(names, parts, strict=True)))
    if isinstance(value, Mapping):
        return dict(zip(value, parts, strict=True))
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
