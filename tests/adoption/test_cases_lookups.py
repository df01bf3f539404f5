"""Which rows a collection gets: those of the ids that it is called with, or a refusal. Against a plain loop."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("torchrec")

from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from tests.support.adoption_cases import DIM, ROWS, Case, Scores, as_expected, bags, clicks, keyed, verdict
from tests.support.lookup_models import (
    Hashing,
    LearnedWeights,
    More,
    Pairs,
    Sometimes,
    Towers,
    changed_ids,
    compiled,
    emptied,
    halved,
    hashed,
    hashed_if,
    hidden_in_list,
    hooked,
    in_place,
    inverse,
    jagged,
    minus_one,
    of_tensor,
    once_each,
    padded,
    pooling,
    processed,
    rebuilt,
    shared_table,
    subclassed,
    two_collections,
    two_tables,
)


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
    "a subclass with more methods": Case(lambda: subclassed(More), clicks()),
    "weights that are learned": Case(LearnedWeights, clicks()),
    "rebuilt from offsets": Case(
        pooling(
            lambda ebc, b: ebc(
                KeyedJaggedTensor.from_offsets_sync(b.sparse.keys(), b.sparse.values(), offsets=b.sparse.offsets())
            ).values()
        ),
        clicks(),
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
    "a subclass with a forward of its own": Case(lambda: subclassed(Hashing), clicks(), "forward of its own"),
    "ids hashed by a hook of the collection": Case(
        hooked(lambda m, i: (KeyedJaggedTensor(i[0].keys(), i[0].values() % 7, lengths=i[0].lengths()),)),
        clicks(),
        NOT_THE_BATCHES,
    ),
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


SLOW = ("compiled network", "compiled model")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in (*EQUAL, *REFUSED)]
)
def test_rows_are_those_of_the_ids_that_are_looked_up(name):
    case = (EQUAL | REFUSED)[name]
    said = verdict(case)
    assert as_expected(case, said), said


ON_TWO = ("positive and negative ids, several", "two collections, fields exchanged half-way", "sequences")
ALL = tuple(name for name in EQUAL if name not in SLOW)


def verdicts(names) -> dict[str, str]:
    return {name: verdict(EQUAL[name]) for name in names}


@pytest.mark.parametrize("names", [ON_TWO, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_on_two_ranks(pool2, names):
    for said in pool2.run(verdicts, names):
        assert {name: what for name, what in said.items() if what != "equal"} == {}
