"""Batches of a TorchRec user: cut into parts and put together again, they are what they were."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torchrec")

from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from nestpipe.adoption.batches import BatchError, BatchFormat, Reads
from tests.support.adoption_models import ROWS, keys

Pair = namedtuple("Pair", "left right")
NO_READS = Reads({}, {})
fuzzed = settings(max_examples=30, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Frozen:
    first: object
    twice: object = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "twice", self.first)


def leaf(kind: str, samples: int, seed: int):
    kjt = keys(samples, seed, weighted=kind.endswith("weighted"))
    if kind.startswith("keyed"):
        return kjt
    if kind.startswith("jagged"):
        return JaggedTensor(values=kjt["a"].values(), lengths=kjt["a"].lengths(), weights=kjt["a"].weights_or_none())
    made = {"dense": torch.randn(samples, 3), "ids": torch.arange(samples) % ROWS, "scalar": torch.tensor(2.5)}
    constants = {"none": None, "text": "clicks", "number": 0.5, "names": [f"n{i}" for i in range(samples)]}
    return (made | constants)[kind]


KINDS = (
    "keyed",
    "keyed weighted",
    "jagged",
    "jagged weighted",
    "dense",
    "ids",
    "scalar",
    "none",
    "text",
    "number",
    "names",
)
NESTS = {
    "dict": lambda parts: {f"f{n}": part for n, part in enumerate(parts)},
    "ordered": lambda parts: OrderedDict((n, part) for n, part in enumerate(parts)),
    "list": list,
    "tuple": tuple,
    "named": lambda parts: Pair(parts[0], parts[-1]),
    "frozen": lambda parts: Frozen(parts[0]),
}
shapes = st.recursive(
    st.sampled_from(KINDS),
    lambda inner: st.tuples(st.sampled_from(sorted(NESTS)), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)


def built(shape, samples, seed):
    if isinstance(shape, str):
        return leaf(shape, samples, seed)
    nest, inner = shape
    return NESTS[nest]([built(part, samples, seed + n) for n, part in enumerate(inner)])


def ragged(jagged):
    """A JaggedTensor as a list of its samples' (values, weights)."""
    weights = jagged.weights_or_none()
    values = zip(jagged.to_dense(), jagged.to_dense_weights() if weights is not None else [None] * 99, strict=False)
    return [(v.tolist(), None if w is None else w.tolist()) for v, w in values]


def require_same(whole, parts, samples):
    """``parts``, one after another, hold what ``whole`` holds, in the same types."""
    assert all(type(part) is type(whole) for part in parts)
    if isinstance(whole, KeyedJaggedTensor):
        assert all(part.keys() == whole.keys() for part in parts)
        for key in list(whole.keys()):
            require_same(whole[key], [p[key] for p in parts if p.stride()], samples)
    elif isinstance(whole, JaggedTensor):
        assert ragged(whole) == [sample for part in parts for sample in ragged(part)]
    elif isinstance(whole, torch.Tensor):
        joined = torch.cat(parts) if whole.dim() else parts[0]
        assert joined.dtype == whole.dtype and torch.equal(joined, whole)
    elif isinstance(whole, Frozen):
        require_same(whole.first, [part.first for part in parts], samples)
        require_same(whole.twice, [part.twice for part in parts], samples)
    elif isinstance(whole, dict):
        assert all(list(part) == list(whole) for part in parts)
        for key, value in whole.items():
            require_same(value, [part[key] for part in parts], samples)
    elif isinstance(whole, list) and all(isinstance(item, str) for item in whole):
        assert whole == [item for part in parts for item in part]
    elif isinstance(whole, list | tuple):
        for n, value in enumerate(whole):
            require_same(value, [part[n] for part in parts], samples)
    else:
        assert all(part == whole for part in parts)


@fuzzed
@given(shape=shapes, samples=st.integers(2, 6), parts=st.integers(1, 8), seed=st.integers(0, 99))
def test_a_batch_of_any_shape_is_the_sum_of_its_parts(shape, samples, parts, seed):
    batch = [torch.arange(samples), built(shape, samples, seed)]
    cut = BatchFormat().to_batch(batch, 10, NO_READS)
    assert len(cut) == samples
    require_same(batch, [BatchFormat().from_batch(part)[0] for part in cut.split(parts)], samples)


def tensors_of(value):
    if isinstance(value, KeyedJaggedTensor | JaggedTensor):
        weights = value.weights_or_none()
        return [value.values(), value.lengths()] + ([] if weights is None else [weights])
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.parametrize("kind", [k for k in KINDS if k.split()[0] in ("keyed", "jagged", "dense", "ids", "scalar")])
def test_neither_loader_nor_model_can_change_what_is_cut(kind):
    batch = [torch.arange(4), leaf(kind, 4, 1)]
    wanted = copy.deepcopy(batch)
    cut = BatchFormat().to_batch(batch, 0, NO_READS)
    for value in tensors_of(batch[1]):
        value.zero_()  # the loader writes its next batch into the same memory
    for value in tensors_of(BatchFormat().from_batch(cut)[0][1]):
        value.zero_()  # the model changes what it was given
    require_same(wanted, [BatchFormat().from_batch(cut)[0]], 4)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (torch.zeros(3, 3), r"batch\.x has 3 rows, but the batch has 4 samples: .*shared=\('x',\)"),
        (object(), r"batch\.x is a object; a batch is a dataclass"),
        (torch.eye(4).to_sparse(), r"batch\.x is a .* tensor; a batch holds dense tensors"),
        (torch.zeros(4).numpy(), r"batch\.x is a ndarray"),
        ({1, 2}, r"batch\.x is a set"),
        (
            KeyedJaggedTensor(
                ["a", "b"], torch.arange(3), lengths=torch.ones(3).long(), stride_per_key_per_rank=[[1], [2]]
            ),
            r"batch\.x has a different number of samples per key",
        ),
    ],
    ids=["rows", "object", "sparse", "ndarray", "set", "variable batch"],
)
def test_batches_that_cannot_be_cut_are_named(broken, message):
    with pytest.raises(BatchError, match=message) as refused:
        BatchFormat().to_batch({"ids": keys(4, 1), "x": broken}, 0, NO_READS)
    assert "\n" not in str(refused.value)


def test_names_of_keys_may_hold_anything():
    names = ["a", "a:weights", "weights of .x:a", ":a", "", ".x:a", "b.c"]
    batch = {"x": KeyedJaggedTensor(names, torch.arange(28), lengths=torch.full((28,), 1), weights=torch.rand(28))}
    batch["x:a"] = JaggedTensor(torch.arange(4), lengths=torch.ones(4, dtype=torch.int64), weights=torch.rand(4))
    cut = BatchFormat().to_batch(batch, 0, NO_READS)
    require_same(batch, [BatchFormat().from_batch(part)[0] for part in cut.split(3)], 4)


def test_shared_tensors_are_whole_in_every_part():
    batch = {"x": torch.zeros(5, 2), "negatives": torch.arange(7), "ids": keys(5, 1)}
    for part in BatchFormat(shared=["negatives"]).to_batch(batch, 0, NO_READS).split(3):
        assert torch.equal(BatchFormat().from_batch(part)[0]["negatives"], torch.arange(7))


@pytest.mark.parametrize(
    ("samples", "sizes"), [(9, [3, 2, 2, 2]), (7, [3, 2, 2, 0]), (3, [3, 0, 0, 0]), (1, [1, 0, 0, 0])]
)
def test_a_batch_is_not_cut_into_single_samples(samples, sizes):
    batch = BatchFormat().to_batch({"dense": torch.rand(samples, 2)}, 0, NO_READS)
    assert [len(part) for part in batch.split(4)] == sizes
