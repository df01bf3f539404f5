"""Takes nested structures apart: dataclasses, named tuples, tuples, lists, mappings and types that a user states."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from nestpipe.data.batch import Batch


class BatchError(ValueError):
    """A user's batch cannot be cut into micro-batches, or looks up ids that it does not hold. Names the field."""


#: By type: (take apart into a mapping or sequence of parts, put together from such).
OwnTypes = Mapping[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]]
#: Makes a structure, given a function from a leaf's path to its value.
Rebuild = Callable[[Callable[[str], Any]], Any]
#: The parts of a structure, keyed by the text that accesses them, and what makes the structure from such parts.
Taken = tuple[dict[str, Any], Callable[[list[Any]], Any]]


def children(value: Any, path: str, own_types: OwnTypes) -> Taken | None:
    """None for a leaf. Raises TypeError for a structure that could not be built again from its parts."""
    for cls in type(value).__mro__:
        if cls in own_types:
            return _own(value, path, *own_types[cls])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value)
    if hasattr(value, "batch_size") and isinstance(value, Mapping):
        raise TypeError(f"batch{path} is a {type(value).__name__}; pass a dict of its tensors (preprocess=dict)")
    if isinstance(value, Mapping):
        return {_step(key): part for key, part in value.items()}, _mapping_maker(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {f".{name}": part for name, part in zip(value._fields, value, strict=True)}, lambda p: type(value)(*p)
    if isinstance(value, tuple | list):
        return {f"[{n}]": part for n, part in enumerate(value)}, lambda parts: type(value)(parts)
    return None


def position(part: Batch, first_id: int) -> list[int]:
    """The places of the samples of ``part`` in its batch, whose first sample has the number ``first_id``."""
    return (part.sample_ids - first_id).tolist()


def _step(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _own(value: Any, path: str, take: Callable[[Any], Any], put: Callable[[Any], Any]) -> Taken:
    parts = take(value)
    taken = None if isinstance(parts, type(value)) else children(parts, path, {})
    if taken is None:
        raise TypeError(f"own_types: batch{path} was taken apart into a {type(parts).__name__}, not a dict or tuple")
    return taken[0], lambda made: put(taken[1](made))


def _mapping_maker(value: Mapping[Any, Any]) -> Callable[[list[Any]], Any]:
    keys = list(value)
    if type(value) is dict or not isinstance(value, MutableMapping):
        return lambda parts: dict(zip(keys, parts, strict=True))
    empty = copy.copy(value)  # an OrderedDict, a defaultdict, a type of the user's
    empty.clear()

    def make(parts: list[Any]) -> Any:
        made = copy.copy(empty)
        made.update(zip(keys, parts, strict=True))
        return made

    return make


def _dataclass(value: Any) -> Taken:
    """``__post_init__`` runs again, so what it derives is derived from the part. Other fields without init are set."""
    fields = dataclasses.fields(value)
    given = [f.name for f in fields if f.init]
    late = [f.name for f in fields if not f.init and hasattr(value, f.name)]
    cls = type(value)
    if late:
        again = cls(**{name: getattr(value, name) for name in given})
        late = [name for name in late if not _same(getattr(again, name, None), getattr(value, name))]
    names = [*given, *late]

    def make(parts: list[Any]) -> Any:
        made = cls(**dict(zip(given, parts[: len(given)], strict=True)))
        for name, part in zip(late, parts[len(given) :], strict=True):
            object.__setattr__(made, name, part)
        return made

    return {f".{name}": getattr(value, name) for name in names}, make


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    try:
        return type(one) is type(other) and bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False
