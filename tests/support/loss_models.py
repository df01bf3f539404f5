"""Models with many kinds of loss, for the cases of adoption."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from nestpipe.adoption.losses import Summed
from tests.support.adoption_cases import DIM, Scores, rank, sequences

bce = F.binary_cross_entropy_with_logits


def loss(function, **options):
    """A model with ``function(scores, batch)`` as its loss."""

    class Model(Scores):
        def loss(self, score, batch):
            return function(score, batch)

    return lambda: Model(**options)


def output(function):
    """A model that returns ``function(model, scores, batch)``."""

    class Model(Scores):
        def __init__(self):
            super().__init__()
            self.second = nn.Linear(2 * DIM, 1)

        def forward(self, batch):
            return function(self, self.score(batch), batch)

    return Model


def two_tasks(model, score, batch):
    other = model.second(model.pooled(batch)).squeeze(1)
    both = bce(score, batch.label) + 0.3 * (other - batch.dense[:, 0]).square().mean()
    return both, {"ctr": score.detach(), "other": other}


def clicked_only(model, score, batch):
    other, on = model.second(model.pooled(batch)).squeeze(1), batch.label > 0
    return bce(score, batch.label) + (other[on] - batch.dense[on, 0]).square().mean(), score


def clicked_summed(model, score, batch):
    return Summed((score - batch.dense[:, 0]).square()[batch.label > 0].sum(), (batch.label > 0).sum()), score


class Penalised(Scores):
    """A penalty on the embeddings."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, batch):
        score = self.score(batch)
        return self.loss(score, batch) + 1e-2 * self.function(self.pooled(batch)), score


class InBatch(Scores):
    """Softmax over the candidates of the batch."""

    only_in_training, scale = False, 1.0

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, batch):
        found = self.ebc(batch.sparse)
        one, other = self.left(found["a"]), self.right(found["b"])
        if self.only_in_training and not self.training:
            return ((one * other).sum(1) - batch.label).square().mean()
        logits = (one @ other.T) * self.scale + batch.dense[:, :1]
        return F.cross_entropy(logits, torch.arange(len(logits)))


class OnlyInTraining(InBatch):
    only_in_training = True


class Huge(InBatch):
    """exp() of its logits is infinite."""

    def forward(self, batch):
        found = self.ebc(batch.sparse)
        logits = self.left(found["a"]) @ self.right(found["b"]).T
        mass = (1e4 * logits.abs()).exp()
        return (mass / mass.sum(1, keepdim=True)).diagonal().mean()


class GradientPenalty(Scores):
    """Differentiates in its forward pass."""

    def forward(self, batch):
        pooled = self.pooled(batch)
        score = self.net(torch.cat([pooled, batch.dense], 1)).squeeze(1)
        (slope,) = torch.autograd.grad(score.sum(), pooled, create_graph=True)
        return self.loss(score, batch) + slope.square().sum(1).mean(), score


class Calibrated(Scores):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def loss(self, score, batch):
        if self.training:
            self.average.mul_(0.9).add_(0.1 * score.mean().detach())
        return super().loss(score - self.average, batch)


class Counting(Scores):
    """A plain attribute that changes the loss from call to call."""

    calls = 0

    def loss(self, score, batch):
        self.calls += 1
        return super().loss(score, batch) * self.calls


class Tokens(Scores):
    """The mean over all tokens of a sequence: of some number for each sample."""

    summed = True

    def __init__(self):
        super().__init__(sequences())
        self.out = nn.Linear(DIM, 5)

    def forward(self, batch):
        found = self.ebc(batch.sparse)["a"]
        each = F.cross_entropy(self.out(found.values()), found.values().argmax(1), reduction="none")
        return Summed(each.sum(), len(each)) if self.summed else each.mean()


class TokenMeans(Tokens):
    summed = False


class Masked(Scores):
    """The mean over labels that are there; in some batches all are."""

    summed = True

    def loss(self, score, batch):
        valid = ~batch.extra.isnan()
        errors = (score - batch.extra)[valid].square()
        return Summed(errors.sum(), valid.sum()) if self.summed else errors.mean()


class MaskedMean(Masked):
    summed = False


def with_holes(first):
    """Labels of which some are missing, from the ``first`` batch on."""

    def extra(step, samples, generator):
        label = torch.rand(samples, generator=generator)
        if step >= first:
            label[: samples // 2 + step] = float("nan")
        return label

    return extra


def in_places(*places):
    """Labels that are there only for the samples in these places."""

    def extra(step, samples, generator):
        label = torch.full((samples,), float("nan"))
        label[list(places)] = torch.rand(len(places), generator=generator)
        return label

    return extra


def weights(step, samples, generator):
    return torch.rand(samples, generator=generator) + 0.1


def weights_later(step, samples, generator):
    return torch.ones(samples) if step == 0 else weights(step, samples, generator)


def weighted_mean(score, batch):
    return (bce(score, batch.label, reduction="none") * batch.extra).sum() / batch.extra.sum()


def weighted_summed(score, batch):
    return Summed((bce(score, batch.label, reduction="none") * batch.extra).sum(), batch.extra.sum())


def one_rank_counts(score, batch):
    """On rank 1 nothing counts."""
    on = (batch.label > 0) & (rank() == 0)
    return Summed((score - batch.label).square()[on].sum(), on.sum())


def half_precision(score, batch):
    return (score.bfloat16() - batch.label.bfloat16()).square().mean()


class Guarded(Scores):
    """Returns a constant for samples of which none has a label."""

    summed = True

    def loss(self, score, batch):
        on = batch.extra > 0
        if not on.any():
            return Summed(torch.zeros(()), 0) if self.summed else torch.zeros(())
        return Summed(score[on].square().sum(), on.sum()) if self.summed else (score * on).square().mean()


class GuardedMean(Guarded):
    summed = False


def only_the_last(step, samples, generator):
    return (torch.arange(samples) > samples - 3).float()
