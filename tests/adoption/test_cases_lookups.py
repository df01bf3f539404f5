"""Which rows a collection gets: those of the ids that it is called with, or a refusal. Against a plain loop."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("torchrec")

from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.support.adoption_cases import DIM, ROWS, Case, Scores, as_expected, bags, clicks, keyed, sequences, verdict


def pooling(function, width=2 * DIM, collection=bags):
    """A model whose pooled embeddings are ``function(its collection, batch)``."""

    class Model(Scores):
        def pooled(self, batch):
            return function(self.ebc, batch)

    return lambda: Model(collection(), width)


def two_collections(function, other, width=4 * DIM, collection=bags):
    class Model(Scores):
        def __init__(self):
            super().__init__(collection(), width)
            self.other = other()

        def pooled(self, batch):
            return torch.cat(function(self.ebc, self.other, batch), 1)

    return Model


class Pairs(Scores):
    """Positive and negative ids through one collection, pairwise ranking loss."""

    def forward(self, batch):
        liked, other = (
            self.net(torch.cat([self.ebc(k).values(), batch.dense], 1)).squeeze(1) for k in (batch.sparse, batch.extra)
        )
        return -nn.functional.logsigmoid(liked - other).mean(), liked


def changed_ids(function):
    """The collection is called with ``function(values, lengths)`` of the batch's ids, and equal keys."""

    def pooled(ebc, batch):
        k = batch.sparse
        return ebc(KeyedJaggedTensor(k.keys(), *function(k.values(), k.lengths()))).values()

    return pooling(pooled)


def in_place(ebc, batch):
    batch.sparse.values().remainder_(10)
    return ebc(batch.sparse).values()


def halved(samples, ebc, batch):
    """Only every other sample's ids, the others get zeros."""
    ids = batch.sparse
    lengths = ids.lengths().view(2, -1) * (torch.arange(ids.stride()) % 2)
    kept = torch.repeat_interleave(torch.arange(ids.stride()) % 2, ids.lengths().view(2, -1)[0])
    kept = torch.cat([kept, torch.repeat_interleave(torch.arange(ids.stride()) % 2, ids.lengths().view(2, -1)[1])])
    return ebc(KeyedJaggedTensor(ids.keys(), ids.values()[kept.bool()], lengths=lengths.flatten())).values()


def rebuilt(ebc, batch):
    parts = batch.sparse.to_dict()
    return ebc(KeyedJaggedTensor.from_jt_dict({name: parts[name] for name in ("b", "a")}))["a"].repeat(1, 2)


def once_each(batch):
    return [batch.sparse, batch.extra]


def hidden_in_list():
    class Model(Scores):
        def __init__(self):
            super().__init__()
            self.others = [self.ebc]
            self.look = functools.partial(self._look, self.ebc)

        @staticmethod
        def _look(collection, ids):
            return collection(ids).values()

        def pooled(self, batch):
            return self.others[0](batch.sparse).values() + self.look(batch.sparse) + self.ebc(batch.sparse).values()

    return Model()


class Towers(Scores):
    """One collection under two paths."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList([Scores(self.ebc), Scores(self.ebc)])

    def score(self, batch):
        return self.towers[0].score(batch) + self.towers[1].score(batch)


def padded(need_indices=False, weights=False):
    class Model(Scores):
        def __init__(self):
            super().__init__(sequences(need_indices=need_indices))

        def pooled(self, batch):
            found, parts = self.ebc(batch.sparse), []
            for name in "ab":
                values = found[name].values()
                if need_indices:
                    values = values * (1 + found[name].weights()[:, None].float() % 2)
                wide = torch.ops.fbgemm.jagged_2d_to_dense(values, found[name].offsets(), 4)
                parts.append(wide.sum(1) * (1.0 if found[name].weights_or_none() is None or need_indices else 2.0))
            return torch.cat(parts, 1)

    return Model


def processed(collection):
    positions = {n: PositionWeightedModule(max_feature_length=4) for n in "ab"}
    if collection:
        positions = PositionWeightedModuleCollection({"a": 4, "b": 4})
    return Scores(FeatureProcessedEmbeddingBagCollection(bags(weighted=True), positions))


def compiled(whole):
    def make():
        model = Scores()
        if whole:
            return torch.compile(model, backend="eager")
        model.net = torch.compile(model.net, backend="eager")
        return model

    return make


class Sometimes(Scores):
    """Looks the second collection up only for batches that say so."""

    def __init__(self):
        super().__init__()
        self.other = bags(prefix="o_")

    def pooled(self, batch):
        found = self.ebc(batch.sparse).values()
        return found + self.other(batch.sparse).values() if batch.extra else found


def of_tensor(function, collection=lambda: bags("i")):
    """A KeyedJaggedTensor that the model makes of another field of the batch."""

    def pooled(ebc, batch):
        values, lengths = function(batch.extra)
        return ebc(KeyedJaggedTensor(["i"], values, lengths=lengths)).values()

    return pooling(pooled, DIM, collection)


def jagged(step, samples, generator):
    lengths = torch.randint(0, 4, (samples,), generator=generator)
    return JaggedTensor(values=torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator), lengths=lengths)


def inverse(variable):
    def change(step, batch):
        ids, samples = batch.sparse.to_dict(), len(batch.label)
        few = samples // 2 if variable else samples
        lengths = [ids["a"].lengths()[:few], ids["b"].lengths()]
        values = [ids["a"].values()[: int(lengths[0].sum())], ids["b"].values()]
        order = torch.stack([torch.arange(samples).flip(0) % few, torch.arange(samples)])
        how = {"stride_per_key_per_rank": [[few], [samples]]} if variable else {"stride": samples}
        batch.sparse = KeyedJaggedTensor(
            ["a", "b"], torch.cat(values), lengths=torch.cat(lengths), inverse_indices=(["a", "b"], order), **how
        )
        return batch

    return change


def emptied(step, batch):
    if step % 2:
        return batch
    ids = batch.sparse.to_dict()
    lengths = torch.cat([torch.zeros(len(batch.label), dtype=torch.int32), ids["b"].lengths()])
    return replace(batch, sparse=KeyedJaggedTensor(["a", "b"], ids["b"].values(), lengths=lengths))


def shared_table():
    tables = [EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t", feature_names=["a", "b"])]
    return EmbeddingBagCollection(tables=tables)


def two_tables():
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name=n, feature_names=["a"]) for n in ("u", "v")
        ]
    )


def hashed(batch):
    k = batch.sparse
    return replace(batch, sparse=KeyedJaggedTensor(k.keys(), k.values() % ROWS, lengths=k.lengths()))


def negatives(**options):
    return lambda step, samples, generator: keyed(samples, generator, **options)


ONE = {"least": 1, "most": 1}
NOT_THE_BATCHES = r"key 'a'.*not those of the batch.*preprocess="

EQUAL = {
    "plain": Case(Scores, clicks()),
    "other key order in every second batch": Case(
        Scores, clicks(change=lambda i, b: replace(b, sparse=b.sparse.permute([1, 0])) if i % 2 else b)
    ),
    "keys that no table has": Case(Scores, clicks(names="xaby")),
    "int32 ids": Case(Scores, clicks(dtype=torch.int32)),
    "weights that nobody reads": Case(Scores, clicks(weighted=True)),
    "weighted": Case(lambda: Scores(bags(weighted=True)), clicks(weighted=True)),
    "weighted, one id each": Case(lambda: Scores(bags(weighted=True)), clicks(weighted=True, **ONE)),
    "mean pooling": Case(lambda: Scores(bags(pooling=PoolingType.MEAN)), clicks()),
    "features without ids": Case(Scores, clicks(change=emptied)),
    "batches without ids": Case(Scores, clicks(most=0)),
    "batches smaller than micro_batches": Case(Scores, clicks(samples=[9, 3, 9, 1])),
    "one table, two keys": Case(lambda: Scores(shared_table()), clicks()),
    "one key, two tables": Case(
        pooling(lambda ebc, b: torch.cat([ebc(b.sparse)["a@u"], ebc(b.sparse)["a@v"]], 1), collection=two_tables),
        clicks(),
    ),
    "permuted": Case(pooling(lambda ebc, b: ebc(b.sparse.permute([1, 0])).values()), clicks()),
    "split": Case(
        two_collections(
            lambda one, two, b: [c(k).values() for c, k in zip((one, two), b.sparse.split([1, 1]), strict=True)],
            lambda: bags("b"),
            2 * DIM,
            lambda: bags("a"),
        ),
        clicks(),
    ),
    "joined": Case(
        pooling(lambda ebc, b: ebc(KeyedJaggedTensor.concat(once_each(b))).values()),
        clicks(names="a", extra=negatives(names="b")),
    ),
    "rebuilt from a dict": Case(pooling(rebuilt), clicks()),
    "cloned": Case(changed_ids(lambda values, lengths: (values.clone(), None, lengths.clone())), clicks()),
    "outputs regrouped": Case(
        two_collections(
            lambda one, two, b: KeyedTensor.regroup([one(b.sparse), two(b.sparse)], [["a"], ["c"]]),
            lambda: bags("c", "o_"),
            2 * DIM,
        ),
        clicks(names="abc"),
    ),
    "positive and negative ids, one each": Case(Pairs, clicks(negatives(**ONE), **ONE)),
    "positive and negative ids, several": Case(Pairs, clicks(negatives())),
    "positive and negative ids, other key order": Case(Pairs, clicks(negatives(names="ba"))),
    "the same ids for both": Case(Pairs, clicks(change=lambda i, b: replace(b, extra=b.sparse))),
    "two collections, two fields, equal keys": Case(
        two_collections(lambda one, two, b: [one(b.sparse).values(), two(b.extra).values()], lambda: bags(prefix="o_")),
        clicks(negatives(**ONE), **ONE),
    ),
    "two collections, fields exchanged half-way": Case(
        two_collections(
            lambda one, two, b: [one(b.sparse).values() + one(b.extra).values(), two(b.extra).values()],
            lambda: bags(prefix="o_"),
        ),
        clicks(negatives()),
    ),
    "one collection, two names": Case(Towers, clicks()),
    "a collection in a list and in a closure": Case(hidden_in_list, clicks()),
    "a collection called three times": Case(
        pooling(lambda ebc, b: ebc(b.sparse).values() * ebc(b.sparse).values().cos() + ebc(b.sparse).values()), clicks()
    ),
    "rows as features of a frozen teacher": Case(
        pooling(lambda ebc, b: ebc(b.sparse).values() * ebc(b.sparse).values().detach().sigmoid()), clicks()
    ),
    "sequences": Case(padded(), clicks()),
    "sequences with indices": Case(padded(need_indices=True), clicks()),
    "sequences of weighted keys": Case(padded(weights=True), clicks(weighted=True)),
    "positions by a dict": Case(lambda: processed(False), clicks()),
    "positions by a collection": Case(lambda: processed(True), clicks()),
    "compiled network": Case(compiled(False), clicks()),
    "compiled model": Case(compiled(True), clicks()),
    "ids in a tensor": Case(
        of_tensor(lambda x: (x, torch.ones_like(x))),
        clicks(lambda i, n, g: torch.randint(0, ROWS, (n,), generator=g)),
    ),
    "ids in a matrix": Case(
        of_tensor(lambda x: (x.flatten(), torch.full((len(x),), 3))),
        clicks(lambda i, n, g: torch.randint(0, ROWS, (n, 3), generator=g)),
    ),
    "ids in a JaggedTensor": Case(of_tensor(lambda x: (x.values(), x.lengths())), clicks(jagged)),
    "inverse indices": Case(Scores, clicks(change=inverse(False), samples=8)),
    "variable batch with inverse indices": Case(Scores, clicks(change=inverse(True), samples=8)),
    "ids hashed by preprocess": Case(Scores, clicks(rows=10**12), options={"preprocess": hashed}, prepare=hashed),
    "a collection that is never called": Case(
        two_collections(lambda one, two, b: [one(b.sparse).values()], lambda: bags(prefix="o_"), 2 * DIM), clicks()
    ),
}

REFUSED = {
    "ids hashed by the model": Case(changed_ids(lambda v, n: (v % 10, None, n)), clicks(), NOT_THE_BATCHES),
    "ids shifted by the model": Case(
        changed_ids(lambda v, n: ((v * 7 + 3) % ROWS, None, n)), clicks(), NOT_THE_BATCHES
    ),
    "large ids hashed by the model": Case(
        changed_ids(lambda v, n: (v % ROWS, None, n)), clicks(rows=10**12), NOT_THE_BATCHES
    ),
    "ids changed in place": Case(pooling(in_place), clicks(), NOT_THE_BATCHES),
    "ids dropped by the model": Case(pooling(functools.partial(halved, None)), clicks(), NOT_THE_BATCHES),
    "ids of samples in reverse": Case(
        changed_ids(lambda v, n: (v, None, n.view(2, -1).flip(1).flatten())), clicks(), NOT_THE_BATCHES
    ),
    "ids of another type": Case(
        changed_ids(lambda v, n: (v.float(), None, n)), clicks(), r"ids of type torch.float32|not those"
    ),
    "keys renamed to others": Case(
        pooling(
            lambda ebc, b: ebc(KeyedJaggedTensor(["b", "c"], b.sparse.values(), lengths=b.sparse.lengths())).values()
        ),
        clicks(),
        "without key 'a'",
    ),
    "hashed by the model from the third batch on": Case(
        pooling(lambda ebc, b: ebc(hashed_if(b)).values()),
        clicks(lambda i, n, g: i > 1),
        NOT_THE_BATCHES,
        later=True,
    ),
    "a field that is looked up only later": Case(
        Sometimes,
        clicks(lambda i, n, g: i > 1),
        "did not look up in the first batch|not those of the batch",
        later=True,
    ),
    "two tables of one name": Case(
        two_collections(lambda one, two, b: [one(b.sparse).values(), two(b.sparse).values()], bags),
        clicks(),
        "two collections have a table 't_a'",
    ),
    "half precision": Case(lambda: Scores(bags(data_type=DataType.FP16)), clicks(), "FP16"),
    "weighted bags, ids without weights": Case(lambda: Scores(bags(weighted=True)), clicks(), "weight"),
    "a key is missing": Case(Scores, clicks(names="ac"), "without key 'b'"),
    "an id beyond the table": Case(Scores, clicks(rows=ROWS + 30), f"rows 0..{ROWS - 1}"),
    "a negative id": Case(
        Scores, clicks(change=lambda i, b: replace(b, sparse=minus_one(b.sparse))), f"id -1.*rows 0..{ROWS - 1}"
    ),
}


def minus_one(ids):
    ids.values()[-1] = -1
    return ids


def hashed_if(batch):
    ids = batch.sparse
    return KeyedJaggedTensor(ids.keys(), ids.values() % 10, lengths=ids.lengths()) if batch.extra else ids


@pytest.mark.parametrize("name", [*EQUAL, *REFUSED])
def test_rows_are_those_of_the_ids_that_are_looked_up(name):
    case = (EQUAL | REFUSED)[name]
    said = verdict(case)
    assert as_expected(case, said), said


def verdicts() -> dict[str, str]:
    return {name: verdict(case) for name, case in EQUAL.items() if "compiled" not in name}


def test_on_two_ranks(pool2):
    for said in pool2.run(verdicts):
        assert {name: what for name, what in said.items() if what != "equal"} == {}
