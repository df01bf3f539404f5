"""Models that look ids up in many ways, for the cases of adoption."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.support.adoption_cases import DIM, ROWS, Scores, bags, sequences


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


def minus_one(ids):
    ids.values()[-1] = -1
    return ids


def hashed_if(batch):
    ids = batch.sparse
    return KeyedJaggedTensor(ids.keys(), ids.values() % 10, lengths=ids.lengths()) if batch.extra else ids
