"""What a batch holds is that batch's: constants, optional fields, nested and own types. Against a plain loop."""

from __future__ import annotations

import collections
import enum
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("torchrec")

from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.support.adoption_cases import ROWS, Case, Clicks, Scores, as_expected, bags, clicks, keyed, verdict


def times(factor):
    """A model whose loss is multiplied by ``factor(batch)``: a number, or one for each sample."""

    class Model(Scores):
        def loss(self, score, batch):
            each = nn.functional.binary_cross_entropy_with_logits(score, batch.label, reduction="none")
            return (each * factor(batch)).mean()

    return Model


def of(unpack):
    """A model of another type of batch: ``unpack`` makes a Clicks of it."""

    class Model(Scores):
        def forward(self, batch):
            return super().forward(unpack(batch))

    return Model


def jagged(weighted):
    def extra(step, samples, generator):
        lengths = torch.randint(0, 4, (samples,), generator=generator)
        total = int(lengths.sum())
        values = torch.randint(0, 9, (total,), generator=generator)
        weights = torch.rand(total, generator=generator) if weighted else None
        return JaggedTensor(values=values, lengths=lengths, weights=weights)

    return extra


def jagged_sums(batch):
    found = batch.extra
    each = found.values().float() if found.weights_or_none() is None else found.weights()
    return torch.segment_reduce(each, "sum", lengths=found.lengths(), unsafe=True)


class Kind(enum.Enum):
    CLICK = 1
    SALE = 3


class Named(NamedTuple):
    sparse: KeyedJaggedTensor
    rest: tuple


@dataclass(frozen=True)
class Inner:
    dense: torch.Tensor
    label: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    sparse: KeyedJaggedTensor
    inner: Inner


@dataclass
class Derived:
    """A field without init that __post_init__ derives, and one that the loader sets."""

    sparse: KeyedJaggedTensor
    dense: torch.Tensor
    label: torch.Tensor
    doubled: torch.Tensor = field(init=False)
    extra: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.doubled = self.dense * 2
        self.extra = torch.zeros(len(self.label))


class Own:
    """A class of the user's."""

    def __init__(self, sparse, dense, label, weight):
        self.sparse, self.dense, self.label, self.weight = sparse, dense, label, weight


OWN = {Own: (lambda b: vars(b).copy(), lambda parts: Own(**parts))}


def derived(step, batch):
    made = Derived(batch.sparse, batch.dense, batch.label)
    made.extra = torch.full((len(batch.label),), 1.0 + step)
    return made


def defaulted(step, batch):
    made = collections.defaultdict(lambda: torch.zeros(()), vars(batch))
    made.pop("extra")
    return made


def reused():
    """A loader that writes each batch into the same tensors."""
    buffers = None
    for batch in clicks(samples=9, least=2, most=2)():
        if buffers is None:
            buffers = batch
        else:
            for name in ("dense", "label"):
                getattr(buffers, name).copy_(getattr(batch, name))
            buffers.sparse.values().copy_(batch.sparse.values())
        yield buffers


class Optional(Scores):
    """Its second KeyedJaggedTensor may be missing."""

    def __init__(self):
        super().__init__()
        self.other = bags(prefix="o_")

    def pooled(self, batch):
        found = super().pooled(batch)
        return found if batch.extra is None else found + self.other(batch.extra).values()


def optional(*present):
    return lambda step, samples, g: keyed(samples, g) if present[step % len(present)] else None


class Candidates(Scores):
    """Sampled softmax over negatives that all samples share; their scores come from a dense table."""

    def __init__(self):
        super().__init__()
        self.out = nn.Embedding(30, 1)

    def loss(self, score, batch):
        logits = torch.cat([score[:, None], self.out(batch.extra).T.expand(len(score), -1)], 1)
        return nn.functional.cross_entropy(logits, torch.zeros(len(score)).long())


SHARED = {"shared": ("extra",)}
LENGTHS = {"click": 1.0, "sale": 2.0, "cart": 3.0}

EQUAL = {
    "a float that changes": Case(times(lambda b: b.extra), clicks(lambda i, n, g: 1.0 + i)),
    "a string that changes": Case(times(lambda b: float(b.extra)), clicks(lambda i, n, g: str(10**i))),
    "a flag that changes": Case(times(lambda b: 3.0 if b.extra else 1.0), clicks(lambda i, n, g: i % 2 == 1)),
    "an enumeration that changes": Case(times(lambda b: b.extra.value), clicks(lambda i, n, g: list(Kind)[i % 2])),
    "a dict of constants": Case(
        times(lambda b: b.extra["w"] * b.extra["more"]["v"]), clicks(lambda i, n, g: {"w": i + 1.0, "more": {"v": 2}})
    ),
    "temperature in a tensor without dims": Case(
        times(lambda b: b.extra), clicks(lambda i, n, g: torch.tensor(1.0 + i))
    ),
    "strings, one for each sample": Case(
        times(lambda b: torch.tensor([LENGTHS[s] for s in b.extra])),
        clicks(lambda i, n, g: [list(LENGTHS)[(i + j) % 3] for j in range(n)]),
    ),
    "numbers in a tuple, one for each sample": Case(
        times(lambda b: torch.tensor(b.extra)), clicks(lambda i, n, g: tuple(float(i + j) for j in range(n)))
    ),
    "task weights in a list": Case(times(lambda b: sum(b.extra)), clicks(lambda i, n, g: [1.0 + i, 2.0])),
    "None, then a tensor": Case(
        times(lambda b: 1.0 if b.extra is None else b.extra),
        clicks(lambda i, n, g: None if i == 0 else torch.rand(n, generator=g)),
    ),
    "a tensor, then None": Case(
        times(lambda b: 1.0 if b.extra is None else b.extra),
        clicks(lambda i, n, g: torch.rand(n, generator=g) if i < 2 else None),
    ),
    "ids only in later batches": Case(Optional, clicks(optional(False, True))),
    "ids only in some batches": Case(Optional, clicks(optional(True, False, True))),
    "a JaggedTensor": Case(times(jagged_sums), clicks(jagged(False))),
    "a JaggedTensor with weights": Case(times(jagged_sums), clicks(jagged(True))),
    "a KeyedTensor": Case(
        times(lambda b: b.extra["w"].sum(1)),
        clicks(lambda i, n, g: KeyedTensor(["v", "w"], [1, 2], torch.rand(n, 3, generator=g))),
    ),
    "a mask": Case(times(lambda b: b.extra.float() + 1), clicks(lambda i, n, g: torch.rand(n, generator=g) > 0.5)),
    "three dims": Case(times(lambda b: b.extra.sum((1, 2))), clicks(lambda i, n, g: torch.rand(n, 2, 3, generator=g))),
    "negatives that are shared": Case(
        Candidates, clicks(lambda i, n, g: torch.randint(0, 30, (7,), generator=g)), options=SHARED
    ),
    "shared, and as many as samples": Case(
        Candidates, clicks(lambda i, n, g: torch.randint(0, 30, (n,), generator=g)), options=SHARED
    ),
    "a tuple": Case(
        of(lambda b: Clicks(b[0], b[1], b[2])),
        clicks(change=lambda i, b: (b.sparse, b.dense, b.label)),
        size=lambda b: len(b[2]),
    ),
    "a dict": Case(
        of(lambda b: Clicks(**b)), clicks(change=lambda i, b: dict(vars(b))), size=lambda b: len(b["label"])
    ),
    "a defaultdict": Case(
        of(lambda b: Clicks(b["sparse"], b["dense"] + b["missing"], b["label"])),
        clicks(change=defaulted),
        size=lambda b: len(b["label"]),
    ),
    "a named tuple in a list": Case(
        of(lambda b: Clicks(b[0].sparse, *b[0].rest)),
        clicks(change=lambda i, b: [Named(b.sparse, (b.dense, b.label))]),
        size=lambda b: len(b[0].rest[1]),
    ),
    "frozen dataclasses": Case(
        of(lambda b: Clicks(b.sparse, b.inner.dense, b.inner.label)),
        clicks(change=lambda i, b: Frozen(b.sparse, Inner(b.dense, b.label))),
        size=lambda b: len(b.inner.label),
    ),
    "fields without init": Case(
        of(lambda b: Clicks(b.sparse, b.doubled * b.extra[:, None], b.label)), clicks(change=derived)
    ),
    "an own class": Case(
        of(lambda b: Clicks(b.sparse, b.dense * b.weight, b.label)),
        clicks(change=lambda i, b: Own(b.sparse, b.dense, b.label, 1.0 + i)),
        options={"own_types": OWN},
    ),
    "an own class inside a dict": Case(
        of(lambda b: Clicks(b["in"].sparse, b["in"].dense, b["in"].label)),
        clicks(change=lambda i, b: {"in": Own(b.sparse, b.dense, b.label, None)}),
        options={"own_types": OWN},
        size=lambda b: len(b["in"].label),
    ),
    "buffers that the loader uses again": Case(times(lambda b: 1.0), reused),
    "one sample": Case(Scores, clicks(samples=1)),
    "one sample first": Case(Scores, clicks(samples=[1, 9, 9])),
}

REFUSED = {
    "a tensor of another length": Case(
        times(lambda b: b.extra.sum()), clicks(lambda i, n, g: torch.ones(7)), r"batch\.extra has 7 rows.*shared="
    ),
    "the same in a later batch": Case(
        times(lambda b: 1.0 if b.extra is None else b.extra.sum()),
        clicks(lambda i, n, g: None if i < 2 else torch.ones(7)),
        r"batch\.extra has 7 rows.*shared=",
        later=True,
    ),
    "an array": Case(times(lambda b: 1.0), clicks(lambda i, n, g: np.ones(n)), r"batch\.extra is a ndarray"),
    "an own class without functions": Case(
        of(lambda b: b), clicks(change=lambda i, b: Own(b.sparse, b.dense, b.label, 1.0)), "own_types="
    ),
    "a set": Case(times(lambda b: 1.0), clicks(lambda i, n, g: {1, 2}), r"batch\.extra is a set"),
    "a sparse tensor": Case(
        times(lambda b: 1.0), clicks(lambda i, n, g: torch.eye(n).to_sparse()), r"batch\.extra.*sparse"
    ),
    "ids that are floats": Case(
        Scores, clicks(change=lambda i, b: replace(b, sparse=floats(b.sparse))), "float32.*integer"
    ),
    "ids that are shared": Case(Scores, clicks(), r"batch\.sparse.*shared", {"shared": ("sparse",)}),
    "nothing but constants": Case(Scores, clicks(change=lambda i, b: {"a": 1}), "no tensor", size=lambda b: 0),
    "a key that is missing later": Case(
        Scores,
        clicks(change=lambda i, b: replace(b, sparse=b.sparse.split([1, 1])[0]) if i == 2 else b),
        "'b'",
        later=True,
    ),
    "an id beyond the table, later": Case(
        Scores,
        clicks(change=lambda i, b: replace(b, sparse=beyond(b.sparse)) if i == 2 else b),
        f"{ROWS - 1}",
        later=True,
    ),
}


def floats(ids):
    return KeyedJaggedTensor(ids.keys(), ids.values().float(), lengths=ids.lengths())


def beyond(ids):
    ids.values()[-1] = ROWS
    return ids


@pytest.mark.parametrize("name", [*EQUAL, *REFUSED])
def test_what_a_batch_holds_is_that_batchs(name):
    case = (EQUAL | REFUSED)[name]
    said = verdict(case)
    assert as_expected(case, said), said
