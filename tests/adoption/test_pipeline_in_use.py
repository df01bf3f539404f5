"""NestPipeline in a user's hands: exporting a trained model, and the errors for plausible mistakes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torchrec")

from nestpipe.adoption.pipeline import NestPipeline
from nestpipe.data import Batch, Jagged
from nestpipe.data.tables import TableConfig
from nestpipe.engine.engine import Engine
from nestpipe.schedule.templates import nestpipe
from nestpipe.trainer import ModelSpec
from tests.support.adoption_models import SGD, Clicks, bags, sgd, user_batch


def first():
    return iter([user_batch(8, 1)])


@pytest.mark.parametrize("device", [None, "meta"])
def test_the_exported_model_is_what_was_trained(device):
    """Its loss on the next batch is the loss of the next step before its update; training continues undisturbed."""
    pipeline = NestPipeline(Clicks(bags(device)), sgd, SGD, micro_batches=2)
    source = iter([user_batch(8, n) for n in range(4)])
    for _ in range(3):
        pipeline.progress(source)
    model = pipeline.export().eval()
    with torch.no_grad():
        loss, _ = model(user_batch(8, 3))
    assert pipeline.progress(source).loss == pytest.approx(float(loss), rel=1e-5)
    weight = model.collection.embedding_bags["t1"].weight
    assert not torch.equal(weight, pipeline.export().collection.embedding_bags["t1"].weight)  # a copy
    plain = Clicks(bags())
    plain.load_state_dict(pipeline.export().state_dict(), strict=True)  # the names are the user's own
    pipeline.close()


def test_the_model_must_not_be_called_next_to_the_pipeline():
    model = Clicks(bags())
    pipeline = NestPipeline(model, sgd, SGD, micro_batches=2)
    pipeline.progress(iter([user_batch(8, 1)]))
    with pytest.raises(RuntimeError, match=r"pipeline\.export\(\)"):
        model(user_batch(8, 1))
    pipeline.close()


def test_exporting_before_the_first_batch_says_so():
    with pytest.raises(RuntimeError, match="no batch has been seen"):
        NestPipeline(Clicks(bags()), sgd, SGD).export()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dense_optimizer": torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)}, "function from parameters"),
        ({"micro_batches": 0}, "micro_batches is 0; it must be at least 1"),
        ({"reduction": "max"}, "reduction 'max'"),
    ],
)
def test_mistakes_in_the_constructor(options, message):
    with pytest.raises(ValueError, match=message):
        NestPipeline(Clicks(bags()), **{"dense_optimizer": sgd, "sparse_optimizer": SGD, **options})


@pytest.mark.parametrize(
    ("model", "batches", "message"),
    [
        (lambda: Clicks(bags()), [user_batch(8, 1)], "takes an iterator"),
        (lambda: Clicks(bags(weighted=True)), first(), "weighted, but the batch's"),
        (lambda: Clicks(bags(), loss=lambda s, y: (s - y).square()), first(), r"returned \d losses"),
        (lambda: Clicks(bags(), loss=lambda s, y: {"loss": s.mean()}), first(), r"its loss, or \(loss, anything\)"),
    ],
)  # fmt: skip
def test_mistakes_that_the_first_batch_shows(model, batches, message):
    with pytest.raises(ValueError, match=message):
        NestPipeline(model(), sgd, SGD, micro_batches=2).progress(batches)


def clicks_of(reduction):
    class Model(torch.nn.Module):
        def __init__(self, embeddings):
            super().__init__()
            self.embeddings, self.score = embeddings, torch.nn.Linear(4, 1)

        def forward(self, batch):
            score = self.score(self.embeddings(batch.sparse)["user"].values()).squeeze(1)
            return getattr(score.square(), reduction)() if reduction else score.square()

    return Model


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_engine_takes_one_loss_per_sample(reduction):
    """A scalar would be off by the size of a micro-batch, and would train without an error."""
    spec = ModelSpec((TableConfig("user", 10, 4, ("user",), 0.1),), clicks_of(reduction))
    ones = torch.ones(6, dtype=torch.int64)
    source = iter([Batch({"user": Jagged(ones, ones)}, ones, {})] * 3)
    engine = Engine(nestpipe(2), spec, SGD, sgd, seed=1)
    with pytest.raises(ValueError, match=r"shape \(\) for 3 samples"):
        engine.progress(source)
    engine.close()


def test_two_tables_of_one_name_are_refused():
    tables = tuple(TableConfig("user", 10, 4, (feature,), 0.1) for feature in ("user", "friend"))
    with pytest.raises(ValueError, match="two embedding tables are called 'user'"):
        Engine(nestpipe(2), ModelSpec(tables, clicks_of(None)), SGD, sgd, seed=1)


def test_a_collection_inside_an_activation_checkpoint_is_refused():
    class Recomputed(Clicks):
        def forward(self, batch):
            pooled = checkpoint(lambda keyed: self.collection(keyed).values(), batch.sparse, use_reentrant=False)
            score = self.net(torch.cat([pooled, batch.dense], 1)).squeeze(1)
            return (score - batch.label).square().mean(), score

    pipeline = NestPipeline(Recomputed(bags()), sgd, SGD, micro_batches=2)
    with pytest.raises(RuntimeError, match="inside an activation checkpoint"):
        pipeline.progress(first())
    pipeline.close()
