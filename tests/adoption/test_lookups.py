"""Collections that are adopted answer as they did, or refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("torchrec")

from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from nestpipe.adoption.batches import BatchError, BatchFormat, Reads
from nestpipe.adoption.collections import find_collections, require_adoptable, stated_optimizer
from nestpipe.adoption.lookups import FromEngine, FromTables, Lookups, adopt, give_back, tables_read_by
from nestpipe.data.batch import Jagged
from nestpipe.embedding.pooling import pool
from nestpipe.trainer import SparseOptimizer
from tests.support.adoption_models import DIM, ROWS, bags, keys

NO_READS = Reads({}, {})
fuzzed = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def sequences(need_indices=False):
    tables = [
        EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t1", feature_names=["a", "b"]),
        EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t2", feature_names=["b", "c"]),
    ]
    return EmbeddingCollection(tables=tables, need_indices=need_indices)


def adopted_answer(collection, asks, batch):
    """What the adopted collection says to each of ``asks`` in micro-batches of 3 and 2, and the tables' gradients."""
    lookups, reads = Lookups(), tables_read_by({"c": collection})
    own = getattr(collection, "embedding_bags", None) or collection.embeddings
    weights = {name: table.weight for name, table in own.items()}
    adopt({"c": collection}, lookups)
    try:
        form = BatchFormat()
        cut = form.to_batch(batch, 0, reads)
        users, handed = form.from_batch(cut)
        with lookups.using(FromTables({n: w.detach() for n, w in weights.items()}, cut, handed, reads)):
            for ask in asks:
                collection(ask(users))
        reads.seen.update(path for path in cut.form.leaves)
        answers = []
        for part in form.to_batch(batch, 0, reads).split(2):
            rows = {
                name: Jagged(weights[table][part.sparse[name].flat], part.sparse[name].counts)
                for table, names in part.reads.items()
                for name in names
            }
            users, handed = form.from_batch(part)
            with lookups.using(FromEngine(rows, part, handed)):
                answers.append([collection(ask(users)) for ask in asks])
        return answers
    finally:
        give_back(collection, own)


def own_answer(collection, asks, batch):
    """The same from the collection itself."""
    cut = BatchFormat().to_batch(batch, 0, NO_READS)
    return [[collection(ask(BatchFormat().from_batch(part)[0])) for ask in asks] for part in cut.split(2)]


def flat(answers):
    found = []
    for answer in (one for part in answers for one in part):
        if isinstance(answer, dict):
            for name in sorted(answer):
                found += [answer[name].values(), answer[name].lengths().float()]
                found += [answer[name].weights().float()] if answer[name].weights_or_none() is not None else []
        else:
            assert answer.keys() == ["a", "b@t1", "b@t2", "c"]
            found.append(answer.values())
    return found


def rebuilt(kjt):
    return KeyedJaggedTensor.from_jt_dict({key: kjt[key] for key in ("c", "a", "b")})


def taken_from(one, other):
    """Key a of the other KeyedJaggedTensor, under that name; b and c of the first."""
    return KeyedJaggedTensor.from_jt_dict({"a": other["a"], "b": one["b"], "c": one["c"]})


ASKS = {
    "whole": lambda b: b["one"],
    "other": lambda b: b["two"],
    "permuted": lambda b: b["one"].permute([2, 0, 1]),
    "split and joined": lambda b: KeyedJaggedTensor.concat(b["one"].split([1, 2])[::-1]),
    "rebuilt": lambda b: rebuilt(b["one"]),
    "of two": lambda b: taken_from(b["one"], b["two"]),
    "under other names": lambda b: KeyedJaggedTensor(
        ["c", "a", "b"], b["one"].values(), b["one"].weights_or_none(), b["one"].lengths()
    ),
}


@fuzzed
@given(
    asks=st.lists(st.sampled_from(sorted(ASKS)), min_size=1, max_size=4),
    kind=st.sampled_from(["mean", "weighted", "sequences", "with ids"]),
    seed=st.integers(0, 99),
    one=st.booleans(),
)
def test_adopted_collections_answer_as_they_did(asks, kind, seed, one):
    weighted = kind == "weighted"
    collection = bags(weighted=weighted) if kind in ("mean", "weighted") else sequences(kind == "with ids")
    batch = {"one": keys(5, seed, weighted, one), "two": keys(5, seed + 1, weighted, one)}
    asked = [ASKS[name] for name in asks]
    ours, theirs = flat(adopted_answer(collection, asked, batch)), flat(own_answer(collection, asked, batch))
    torch.testing.assert_close(ours, theirs)
    gradients = []
    for answers in (ours, theirs):
        total = sum((a * torch.arange(1, a.numel() + 1).view_as(a)).sum() for a in answers if a.requires_grad)
        gradients.append(torch.autograd.grad(total, list(collection.parameters()), allow_unused=True))
    torch.testing.assert_close(*gradients)


def without_samples(kjt):
    return KeyedJaggedTensor(kjt.keys(), kjt.values()[:0], lengths=kjt.lengths()[:0], stride=0)


@pytest.mark.parametrize("collection", [bags, sequences])
def test_micro_batches_without_samples(collection):
    batch = {"one": without_samples(keys(2, 1)), "x": torch.zeros(0, 3)}
    for answer in adopted_answer(collection(), [ASKS["whole"]], batch):
        assert all(not len(value) for value in flat([answer]))


def in_place(batch):
    kjt = batch["one"]
    kjt.values().copy_((kjt.values() + 1) % ROWS)
    return kjt


def jagged_in_place(batch):
    batch["jagged"].values().add_(1).remainder_(ROWS)
    one = batch["one"]
    return KeyedJaggedTensor.from_jt_dict({"a": batch["jagged"], "b": one["b"], "c": one["c"]})


def hashed(batch):
    kjt = batch["one"]
    return KeyedJaggedTensor(kjt.keys(), (kjt.values() * 7 + 3) % ROWS, lengths=kjt.lengths())


def cut_short(batch):
    none = JaggedTensor(values=batch["one"]["a"].values()[:0], lengths=batch["one"]["a"].lengths() * 0)
    return KeyedJaggedTensor.from_jt_dict({"a": none, "b": batch["one"]["b"], "c": batch["one"]["c"]})


@pytest.mark.parametrize("change", [in_place, jagged_in_place, hashed, cut_short])
@pytest.mark.parametrize("later", [False, True], ids=["at first", "later"])
def test_ids_that_are_not_the_batchs_are_refused(change, later):
    calls = []

    def ask(batch):
        calls.append(1)
        return change(batch) if not later or len(calls) > 1 else batch["one"]

    kjt = keys(5, 3)
    jagged = JaggedTensor(values=kjt["a"].values().clone(), lengths=kjt["a"].lengths())
    with pytest.raises(BatchError, match=r"'c' looks up key 'a' with ids that are not those of the batch.*preprocess="):
        adopted_answer(bags(), [ask], {"one": kjt, "jagged": jagged})


def test_ids_of_the_batch_that_were_not_looked_up_at_first_are_said_to_be_so():
    calls = []

    def ask(batch):
        calls.append(1)
        return batch["one" if len(calls) == 1 else "two"]

    with pytest.raises(BatchError, match="ids of the batch that it did not look up in the first batch"):
        adopted_answer(bags(), [ask], {"one": keys(5, 1), "two": keys(5, 2)})


def test_rows_that_the_model_changes_in_place_are_fresh_in_the_next_lookup():
    collection, batch = sequences(), {"one": keys(5, 1)}
    lookups, reads = Lookups(), tables_read_by({"c": collection})
    tables = {name: table.weight.detach() for name, table in collection.embeddings.items()}
    adopt({"c": collection}, lookups)
    part = BatchFormat().to_batch(batch, 0, reads)
    rows = {
        name: Jagged(tables[table][part.sparse[name].flat], part.sparse[name].counts)
        for table, names in part.reads.items()
        for name in names
    }
    users, handed = BatchFormat().from_batch(part)
    with lookups.using(FromEngine(rows, part, handed)):
        first = collection(users["one"])["a"].values()
        wanted = first.clone()
        first.zero_()
        assert torch.equal(collection(users["one"])["a"].values(), wanted)


def test_adopted_collections_say_where_their_tables_are_and_get_them_back():
    model = nn.ModuleDict({"one": nn.ModuleDict({"c": bags()})})
    model["alias"] = model["one"]["c"]
    (collection,) = find_collections(model).values()
    own = collection.embedding_bags
    adopt(find_collections(model), Lookups())
    assert not list(model.parameters())
    with pytest.raises(RuntimeError, match=r"pipeline\.export"):
        _ = model["alias"].embedding_bags
    with pytest.raises(RuntimeError, match=r"pipeline\.progress"):
        copy.deepcopy(model)["alias"](keys(2, 1))
    with pytest.raises(ValueError, match="detach"):
        require_adoptable(model)
    give_back(collection, own)
    assert model["alias"].embedding_bags is own and len(list(model.parameters())) == 2


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.collection = sequences()
        self.out = nn.Linear(DIM, ROWS, bias=False)
        self.out.weight = self.collection.embeddings["t1"].weight


class OwnForward(type(bags())):
    def forward(self, features):
        return super().forward(features)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Tied, r"out\.weight is the weight of table 't1'"),
        (lambda: nn.ModuleDict({"x": nn.Linear(1, 1)}), "holds no EmbeddingBagCollection"),
        (lambda: nn.ModuleDict({"own": OwnForward(tables=bags().embedding_bag_configs())}), r"own \(OwnForward\)"),
    ],
    ids=["tied", "none", "own forward"],
)
def test_models_whose_tables_cannot_be_taken_are_named(model, message):
    with pytest.raises(ValueError, match=message):
        require_adoptable(model())


def test_pooling_of_uneven_samples():
    rows, lengths = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([2, 0, 1])
    weights = torch.tensor([3.0, 1.0, 0.5])
    assert pool(rows, lengths, "sum").flatten().tolist() == [3, 0, 4]
    assert pool(rows, lengths, "mean").flatten().tolist() == [1.5, 0, 4]
    assert pool(rows, lengths, "mean", weights).flatten().tolist() == [2.5, 0, 2]
    assert pool(torch.empty(0, 2), torch.zeros(3).long()).shape == (3, 2)


def test_the_optimizer_that_the_user_stated_is_used():
    collection = bags()
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.02, "eps": 1e-6})
    assert stated_optimizer({"": collection}) == SparseOptimizer("rowwise_adagrad", 0.02, 1e-6)
    other = bags()
    apply_optimizer_in_backward(torch.optim.Adagrad, other.parameters(), {"lr": 0.02})
    with pytest.raises(ValueError, match="Adagrad"):
        stated_optimizer({"": other})
