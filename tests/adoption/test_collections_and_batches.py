"""Drop-ins and batches of a TorchRec user: both give what the user's own collections and batches give."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

pytest.importorskip("torchrec")

from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from nestpipe.adoption.batches import BatchError, ForeignBatches
from nestpipe.adoption.collections import HandedRows, drop_in, read_keys, stated_optimizer
from nestpipe.adoption.pipeline import NestPipeline
from nestpipe.data.batch import Jagged
from nestpipe.embedding.pooling import pool
from nestpipe.trainer import SparseOptimizer
from tests.support.adoption_models import DIM, ROWS, SGD, Clicks, UserBatch, bags, keys, sgd, user_batch


class Rows(nn.Module):
    """Hands out rows of the collection's own tables, as the engine would."""

    def __init__(self, collection, kjt):
        super().__init__()
        tables = getattr(collection, "embedding_bags", None) or collection.embeddings
        self.rows = {
            feature: Jagged(tables[feature.split("/")[0]].weight[kjt[key].values()], kjt[key].lengths())
            for key, features in read_keys({"": collection}).items()
            for feature in features
        }

    def forward(self, _):
        return self.rows


@pytest.mark.parametrize("one", [False, True], ids=["jagged", "one key each"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bag_drop_in_equals_the_collection(weighted, one):
    collection, kjt = bags(weighted=weighted), keys(7, 1, weighted, one)
    wanted = collection(kjt)
    got = drop_in("", collection, HandedRows(Rows(collection, kjt)))(kjt)
    assert got.keys() == wanted.keys()
    torch.testing.assert_close(got.values(), wanted.values())
    slope = torch.randn_like(wanted.values())
    ours = torch.autograd.grad((got.values() * slope).sum(), list(collection.parameters()))
    theirs = torch.autograd.grad((wanted.values() * slope).sum(), list(collection.parameters()))
    torch.testing.assert_close(ours, theirs)


def test_sequence_drop_in_equals_the_collection():
    collection = EmbeddingCollection(
        tables=[
            EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t1", feature_names=["a", "b"]),
            EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t2", feature_names=["b", "c"]),
        ]
    )
    kjt = keys(5, 2)
    wanted, got = collection(kjt), drop_in("", collection, HandedRows(Rows(collection, kjt)))(kjt)
    assert got.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(got[name].values(), wanted[name].values())
        assert torch.equal(got[name].lengths(), wanted[name].lengths())


def test_pooling_of_uneven_samples():
    rows, lengths = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([2, 0, 1])
    weights = torch.tensor([3.0, 1.0, 0.5])
    assert pool(rows, lengths, "sum").flatten().tolist() == [3, 0, 4]
    assert pool(rows, lengths, "mean").flatten().tolist() == [1.5, 0, 4]
    assert pool(rows, lengths, "mean", weights).flatten().tolist() == [2.5, 0, 2]
    assert pool(torch.empty(0, 2), torch.zeros(3).long()).shape == (3, 2)


def test_batches_of_any_type_survive_a_split():
    Pair = namedtuple("Pair", "left right")
    batch = {"in": Pair(user_batch(5, 1, weighted=True), [torch.arange(5), None])}
    foreign = ForeignBatches({"a": ["t1/a"], "b": ["t1/b", "t2/b"]}, batch)
    converted = foreign.to_batch(batch, 10)
    assert set(converted.sparse) == {"t1/a", "t1/b", "t2/b"} and converted.sample_ids.tolist() == [10, 11, 12, 13, 14]
    for part, start in zip(converted.split(2), (0, 3), strict=True):
        back = foreign.from_batch(part)["in"]
        count = len(part)
        assert isinstance(back, Pair) and isinstance(back.left, UserBatch) and back.left.name == "clicks"
        assert back.right == [pytest.approx(torch.arange(start, start + count)), None]
        assert torch.equal(back.left.dense, batch["in"].left.dense[start : start + count])
        for key in "abc":
            mine, whole = back.left.sparse[key], batch["in"].left.sparse[key]
            low, high = int(whole.offsets()[start]), int(whole.offsets()[start + count])
            assert torch.equal(mine.values(), whole.values()[low:high])
            assert torch.equal(mine.weights(), whole.weights()[low:high])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda b: b.__setattr__("dense", torch.tensor(1.0)), r"batch\.dense is a tensor without a row per sample"),
        (lambda b: b.__setattr__("dense", torch.zeros(3, 3)), r"differ in their number of samples: .*batch\.dense 3"),
        (lambda b: b.__setattr__("name", object()), r"batch\.name is a object"),
        (lambda b: b.__setattr__("sparse", None), "has the key 'a'"),
    ],
)
def test_batches_that_cannot_be_cut_are_named(broken, message):
    batch = user_batch(4, 1)
    broken(batch)
    pipeline = NestPipeline(Clicks(bags()), sgd, SGD, micro_batches=2)
    with pytest.raises(BatchError, match=message):
        pipeline.progress(iter([batch]))


def test_the_optimizer_that_the_user_stated_is_used():
    collection = bags()
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.02, "eps": 1e-6})
    assert stated_optimizer({"": collection}) == SparseOptimizer("rowwise_adagrad", 0.02, 1e-6)
    other = bags()
    apply_optimizer_in_backward(torch.optim.Adagrad, other.parameters(), {"lr": 0.02})
    with pytest.raises(ValueError, match="Adagrad"):
        stated_optimizer({"": other})
