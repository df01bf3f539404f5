"""The batches of a case, in the types that a user might have."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, make_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.fuzz.cases import OTHER_SOURCES, ROWS, Case

#: Fields of the two halves of a batch.
FIRST = ("x", "dense", "constant", "weight", "jagged", "flag", "enum", "names", "jagged_ids")
SECOND = (
    "y", "label", "string", "number", "shared", "list", "matrix", "nothing", "pooled", "dense_ids",
)  # fmt: skip
NAMES = FIRST + SECOND
Tuple = namedtuple("Tuple", NAMES)  # type: ignore[misc]
Plain = make_dataclass("Plain", NAMES)
Frozen = make_dataclass("Frozen", NAMES, frozen=True)
Half = make_dataclass("Half", FIRST)


class Own:
    """A type that nothing knows how to cut."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


OWN_TYPES = {Own: (lambda own: own.fields, Own)}


class Kind(Enum):
    EVEN = 0
    ODD = 1


def field(batch: Any, name: str) -> Any:
    """What a batch of any type has under ``name``."""
    if isinstance(batch, Own):
        return batch.fields[name]
    if isinstance(batch, dict) and "outer" in batch:
        half, rest = batch["outer"]
        return getattr(half, name) if name in FIRST else rest["rest"][0][name]
    if isinstance(batch, dict):
        return batch[name] if name in batch else batch["inner"][0][name]
    if type(batch) is tuple:
        return batch[NAMES.index(name)]
    return getattr(batch, name)


def shared_fields(case: Case) -> tuple[str, ...]:
    """The names of the fields that are not per sample, as the user states them."""
    if "shared" not in case.extras:
        return ()
    places = {"tuple": f"[{NAMES.index('shared')}]", "deep": "outer[1].rest[0].shared"}
    return (places.get(case.batch, "shared"),)


def _wrapped(kind: str, parts: dict[str, Any]) -> Any:
    if kind in ("dataclass", "frozen", "namedtuple"):
        return {"dataclass": Plain, "frozen": Frozen, "namedtuple": Tuple}[kind](**parts)
    if kind == "own":
        return Own(parts)
    if kind == "tuple":
        return tuple(parts[name] for name in NAMES)
    if kind == "ordered":
        return OrderedDict(parts)
    first, second = ({name: parts[name] for name in names} for names in (FIRST, SECOND))
    if kind == "deep":
        return {"outer": (Half(**first), {"rest": [second]})}
    return {**second, "inner": [first]} if kind == "nested" else parts


def batches(case: Case, number: int, rank: int, reuse: bool = False) -> Iterator[Any]:
    """The batches of pass ``number`` on a rank. ``reuse``: what has been handed out is overwritten by the next."""
    generator = None if case.repeat else torch.Generator().manual_seed(case.seed * 1009 + number * 31 + rank)
    for step, samples in enumerate(case.passes[number][rank]):
        batch = _batch(case, number, step, samples, generator)
        yield batch
        if reuse:
            for tensor in _tensors(batch):
                tensor.zero_()


class Again:
    """All passes in one iterator, which continues after each StopIteration."""

    def __init__(self, passes: list[Iterator[Any]]) -> None:
        self._passes = passes

    def __iter__(self) -> Again:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._passes[0])
        except StopIteration:
            self._passes = self._passes[1:] or self._passes
            raise


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those that a loader may use again: of lengths too, but not of shapes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, JaggedTensor | KeyedJaggedTensor):
        yield from (t for t in (value.values(), value.lengths(), value.weights_or_none()) if t is not None)
    elif isinstance(value, Own):
        yield from _tensors(value.fields)
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
    elif is_dataclass(value):
        for part in fields(value):
            yield from _tensors(getattr(value, part.name))


def _batch(case: Case, number: int, step: int, n: int, generator: torch.Generator | None) -> Any:
    parts: dict[str, Any] = dict.fromkeys(NAMES)
    first = number == 0 and step == 0
    is_late = {"always": False, "at first": not first, "later": first, "odd steps": step % 2 == 0}[case.late]
    for name, keys in case.keys:
        order = list(keys) if step % 2 else list(reversed(keys))
        keyed = _keyed(case, order, n, generator)
        parts[name] = None if name == "y" and is_late else keyed
    parts["dense"] = torch.randn(n, 3, generator=generator)
    parts["label"] = torch.randn(n, generator=generator)
    parts["weight"] = _weight(case, number, step, n, generator)
    sources = {look.source for look in case.lookups}
    if sources & set(OTHER_SOURCES) or "outside" in case.habits:
        parts["dense_ids"] = torch.randint(0, ROWS, (n, 2), generator=generator)
        parts["jagged_ids"] = _jagged(n, torch.randint(0, ROWS, (3 * n,), generator=generator), None, generator)
    parts |= _extras(case, step, n, generator)
    return _wrapped(case.batch, parts)


def _weight(case: Case, number: int, step: int, n: int, generator: torch.Generator | None) -> Tensor | None:
    weight = torch.rand(n, generator=generator) + 0.2
    if case.loss == "weighted later":
        return torch.ones(n) if step < 2 else weight
    if case.loss == "masked":  # of many samples, or of exactly one, so that most parts of the batch have none
        few = torch.arange(n) == n // 2
        return (few if case.seed % 2 else weight > 0.6).float()
    if case.loss == "tokens":
        return (weight * 5).floor() if case.seed % 2 else weight
    first = number == 0 and step == 0
    there = {"no": False, "later": not first, "at first": first, "always": True}[case.optional]
    return weight if there or case.loss == "weighted" else None


def _extras(case: Case, step: int, n: int, generator: torch.Generator | None) -> dict[str, Any]:
    rows = torch.rand(n, 4, generator=generator)
    values = torch.rand(3 * n, generator=generator)
    made = {
        "constant": 0.5 + 0.25 * step,
        "string": "s" * (step + 1),
        "number": torch.tensor(1.0 + step),
        "shared": torch.randn(5, generator=generator),
        "list": [0.1 * k for k in range(n)],
        "names": [f"{'u' * (k + 1)}" for k in range(n)],
        "flag": rows[:, 0] > 0.5,
        "matrix": rows.view(n, 2, 2).double(),
        "enum": Kind(step % 2),
        "nothing": None if step % 2 else 3,
        "pooled": KeyedTensor(["p", "q"], [1, 3], rows),
        "jagged": _jagged(n, torch.arange(3 * n), values, generator),
    }
    return {name: value for name, value in made.items() if name in case.extras}


def _jagged(n: int, values: Tensor, weights: Tensor | None, generator: torch.Generator | None) -> JaggedTensor:
    lengths = torch.randint(0, 3, (n,), generator=generator)
    total = int(lengths.sum())
    return JaggedTensor(values[:total], lengths=lengths, weights=None if weights is None else weights[:total])


def _keyed(case: Case, keys: list[str], n: int, generator: torch.Generator | None) -> KeyedJaggedTensor:
    inverse = None
    if case.keyed == "inverse" and n:
        distinct = (n + 1) // 2
        inverse = (keys, torch.randint(0, distinct, (len(keys), n), generator=generator))
        n = distinct
    low, high = (1, 1) if case.ids.startswith("one") else (0, 3)
    lengths = torch.randint(low, high + 1, (len(keys), n), generator=generator, dtype=torch.int32)
    if case.ids.startswith("few"):
        lengths[0] = 0  # a key without ids, another one in the next batch
    lengths = lengths.flatten()
    total = int(lengths.sum())
    values = torch.randint(0, ROWS, (total,), generator=generator)
    weights = torch.rand(total, generator=generator) + 0.5 if "weights" in case.ids else None
    if case.ids.startswith("int32"):
        values = values.int()
    if case.preprocess:
        values = values * 1000 + 7  # undone by ``prepared``
    if case.keyed == "offsets" and n:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).int()])
        return KeyedJaggedTensor(keys=keys, values=values, offsets=offsets, weights=weights, stride=n)
    if case.keyed == "long lengths":
        lengths = lengths.long()
    return KeyedJaggedTensor(
        keys=keys, values=values, lengths=lengths, weights=weights, stride=n, inverse_indices=inverse
    )


def prepared(batch: Any) -> Any:
    """What preprocess= does in cases that have it: raw ids become rows."""
    for name in ("x", "y"):
        keyed = field(batch, name)
        if keyed is not None:
            keyed._values = (keyed.values() - 7) // 1000
    return batch
