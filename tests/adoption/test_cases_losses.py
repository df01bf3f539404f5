"""What a loss is: separable by sample, or divided by a count, or refused with more than one micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("torchrec")

from nestpipe.adoption.losses import Summed
from nestpipe.adoption.pipeline import NestPipeline
from tests.support.adoption_cases import (
    RULE,
    Case,
    Scores,
    as_expected,
    bags,
    clicks,
    sgd,
    verdict,
)
from tests.support.loss_models import (
    Calibrated,
    Counting,
    GradientPenalty,
    Guarded,
    GuardedMean,
    Huge,
    InBatch,
    Masked,
    MaskedMean,
    OnlyInTraining,
    Penalised,
    TokenMeans,
    Tokens,
    bce,
    clicked_only,
    clicked_summed,
    half_precision,
    in_places,
    loss,
    one_rank_counts,
    only_the_last,
    output,
    two_tasks,
    weighted_mean,
    weighted_summed,
    weights,
    weights_later,
    with_holes,
)

ONE, FREE, SUM, NONE = {"micro_batches": 1}, {"check": False}, {"reduction": "sum"}, {"reduction": "none"}
WHY = r"is not the sum over its parts.*micro_batches=1"

EQUAL = {
    "a sum": Case(loss(lambda s, b: bce(s, b.label, reduction="sum")), clicks(), options=SUM),
    "a sum, uneven": Case(loss(lambda s, b: bce(s, b.label, reduction="sum")), clicks(samples=[12, 5]), options=SUM),
    "one for each sample": Case(loss(lambda s, b: bce(s, b.label, reduction="none")), clicks(), options=NONE),
    "one for each sample, a column": Case(
        loss(lambda s, b: bce(s, b.label, reduction="none")[:, None]), clicks(), options=NONE
    ),
    "shape [1]": Case(loss(lambda s, b: bce(s, b.label)[None]), clicks()),
    "only the loss": Case(output(lambda m, s, b: bce(s, b.label)), clicks()),
    "a list": Case(output(lambda m, s, b: [bce(s, b.label), s]), clicks()),
    "three outputs": Case(output(lambda m, s, b: (bce(s, b.label), s, b.label)), clicks()),
    "a pair of scalars": Case(output(lambda m, s, b: (bce(s, b.label), s.mean())), clicks()),
    "two tasks": Case(output(two_tasks), clicks()),
    "weights of samples": Case(loss(lambda s, b: bce(s, b.label, weight=b.extra)), clicks(weights)),
    "L2 of weights in the loss": Case(
        output(lambda m, s, b: bce(s, b.label) + 0.01 * sum(p.square().sum() for p in m.net.parameters())), clicks()
    ),
    "a penalty for each sample": Case(lambda: Penalised(lambda rows: rows.norm(dim=1).mean()), clicks()),
    "a fixed number of terms for each sample": Case(
        loss(lambda s, b: (s[:, None] - b.dense).square().mean()), clicks()
    ),
    "a weighted mean, one micro-batch": Case(loss(weighted_mean), clicks(weights), options=ONE),
    "a weighted mean, summed": Case(loss(weighted_summed), clicks(weights)),
    "a weighted mean, summed, one micro-batch": Case(loss(weighted_summed), clicks(weights), options=ONE),
    "a weighted mean, summed, serial": Case(loss(weighted_summed), clicks(weights), options={"method": "serial"}),
    "over clicked samples, summed": Case(output(clicked_summed), clicks()),
    "over labels that are there, summed": Case(Masked, clicks(with_holes(0))),
    "the same, all there at first": Case(Masked, clicks(with_holes(1))),
    "over tokens, summed": Case(Tokens, clicks()),
    "over tokens, uneven ranks": Case(Tokens, clicks(samples=[14, 3])),
    "a count on one rank only": Case(loss(one_rank_counts), clicks()),
    "nothing counts": Case(loss(lambda s, b: Summed((s * 0).sum(), 0)), clicks()),
    "a constant for parts without labels, summed": Case(Guarded, clicks(only_the_last)),
    "a constant for parts without labels": Case(GuardedMean, clicks(only_the_last)),
    "a count that is a number": Case(loss(lambda s, b: Summed(s.square().sum(), 2.0 * len(s))), clicks()),
    "in-batch softmax, one micro-batch": Case(InBatch, clicks(), options=ONE),
    "batch norm, one micro-batch": Case(lambda: Scores(middle=nn.BatchNorm1d(8)), clicks(), options=ONE),
    "a buffer that learns, one micro-batch": Case(Calibrated, clicks(), options=ONE),
    "scores that are squeezed, so one sample is an error": Case(
        loss(lambda s, b: bce(s.squeeze(), b.label)), clicks(samples=[9, 5, 3]), options={"micro_batches": 8}
    ),
    "layer norm": Case(lambda: Scores(middle=nn.LayerNorm(8)), clicks()),
    "no dropout in eval": Case(lambda: Scores(middle=nn.Dropout(0.0)), clicks()),
    "a gradient in the loss": Case(GradientPenalty, clicks()),
    "bfloat16": Case(loss(half_precision), clicks(), tolerance=0.02),
    "bfloat16, other samples": Case(loss(half_precision), clicks(samples=[16, 13, 7]), tolerance=0.02),
    "batches of one sample": Case(loss(lambda s, b: bce(s, b.label)), clicks(samples=1, steps=6)),
}

REFUSED = {
    "a sum for a mean": Case(loss(lambda s, b: bce(s, b.label, reduction="sum")), clicks(), r"reduction='sum'"),
    "a mean for a sum": Case(Scores, clicks(), WHY, SUM),
    "predictions for losses": Case(output(lambda m, s, b: s), clicks(), r"9 losses.*return \(loss, predictions\)"),
    "one loss for all samples": Case(Scores, clicks(), r"reduction='none' it returns one for each sample", NONE),
    "a dict of losses": Case(output(lambda m, s, b: ({"ctr": bce(s, b.label)}, s)), clicks(), "first part is a dict"),
    "no loss": Case(output(lambda m, s, b: None), clicks(), "it returned NoneType"),
    "a number": Case(output(lambda m, s, b: float(bce(s, b.label))), clicks(), "it returned float"),
    "an integer tensor": Case(output(lambda m, s, b: s.sum().long()), clicks(), "int64"),
    "a weighted mean": Case(loss(weighted_mean), clicks(weights), WHY),
    "a weighted mean whose first weights are 1": Case(loss(weighted_mean), clicks(weights_later), WHY, later=True),
    "over clicked samples": Case(output(clicked_only), clicks(), WHY + "|finite"),
    "over labels that are there": Case(MaskedMean, clicks(with_holes(0)), WHY + "|finite"),
    "over labels, as many in every other sample": Case(MaskedMean, clicks(in_places(0, 1, 6, 7)), WHY + "|finite"),
    "over labels, as many in every third": Case(MaskedMean, clicks(in_places(0, 4, 8)), WHY + "|finite"),
    "over labels, as many in half of the batch": Case(MaskedMean, clicks(in_places(3, 5), samples=8), WHY + "|finite"),
    "over labels that are all there at first": Case(MaskedMean, clicks(with_holes(1)), WHY + "|finite", later=True),
    "over tokens": Case(TokenMeans, clicks(), WHY + "|finite"),
    "in-batch softmax": Case(InBatch, clicks(), "in-batch negatives"),
    "in-batch softmax only in training": Case(OnlyInTraining, clicks(), "in-batch negatives"),
    "in-batch softmax, one sample first": Case(InBatch, clicks(samples=[1, 8, 8]), "in-batch negatives"),
    "in-batch softmax, one sample in each batch": Case(
        InBatch, clicks(samples=[1, 1, 8]), "in-batch negatives", later=True
    ),
    "not a number": Case(Huge, clicks(), "is nan|is inf"),
    "the norm of the batch": Case(lambda: Penalised(lambda rows: rows.norm()), clicks(), WHY),
    "the largest error": Case(loss(lambda s, b: (s - b.label).abs().max()), clicks(), WHY),
    "the deviation of the scores": Case(loss(lambda s, b: bce(s, b.label) + s.std()), clicks(), WHY + "|finite"),
    "pairs of the batch": Case(loss(lambda s, b: F.softplus(s[:-1] - s[1:]).mean()), clicks(), WHY),
    "a square of the mean": Case(loss(lambda s, b: (s.mean() - b.label.mean()).square()), clicks(), WHY),
    "batch norm": Case(lambda: Scores(middle=nn.BatchNorm1d(8)), clicks(), r"net\.1 \(BatchNorm1d\)"),
    "batch norm that a function does": Case(
        loss(lambda s, b: bce(F.batch_norm(s[:, None], None, None, training=True)[:, 0], b.label)), clicks(), WHY
    ),
    "a buffer that learns": Case(Calibrated, clicks(), "buffer 'average' changes"),
    "an attribute that changes the loss": Case(Counting, clicks(), "two passes over the same batch"),
    "random negatives drawn in the loss": Case(
        loss(lambda s, b: (s - torch.rand(len(s))).square().mean()), clicks(), "draws random numbers"
    ),
    "a count that needs a gradient": Case(
        loss(lambda s, b: Summed(s.sum(), s.exp().sum())), clicks(), "count", later=True
    ),
    "a count of each sample": Case(loss(lambda s, b: Summed(s.sum(), torch.ones(len(s)))), clicks(), "count"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_trained(name):
    said = verdict(EQUAL[name])
    assert as_expected(EQUAL[name], said), said


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    said = verdict(REFUSED[name])
    assert as_expected(REFUSED[name], said), said


ON_TWO = ("a sum, uneven", "over tokens, uneven ranks", "a count on one rank only", "nothing counts")


def verdicts(names) -> dict[str, str]:
    return {name: verdict(EQUAL[name]) for name in names}


@pytest.mark.parametrize("names", [ON_TWO, pytest.param(tuple(EQUAL), marks=pytest.mark.slow)], ids=["some", "all"])
def test_on_two_ranks(pool2, names):
    for said in pool2.run(verdicts, names):
        assert {name: what for name, what in said.items() if what != "equal"} == {}


@pytest.mark.parametrize("middle", [nn.Dropout(0.3), nn.AlphaDropout(0.2)])
def test_dropout_trains(middle):
    pipeline = NestPipeline(Scores(middle=middle), sgd, RULE, micro_batches=3)
    batches = iter(clicks()())
    assert [pipeline.progress(batches).loss > 0 for _ in range(3)] == [True] * 3
    pipeline.close()


def test_autocast_around_progress():
    """It holds for the thread that calls progress(); the model runs there."""
    with torch.autocast("cpu", torch.bfloat16):
        pipeline = NestPipeline(Scores(bags()), sgd, RULE, micro_batches=3)
        pipeline.progress(iter(clicks()()))
        assert pipeline.output.dtype == torch.bfloat16
        pipeline.close()
