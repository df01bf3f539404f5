"""What the separability check finds, what it lets pass, and that it leaves no trace."""

from __future__ import annotations

import math
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("torchrec")

from nestpipe.adoption import NestPipeline, NotSeparable
from nestpipe.adoption.separable import Looks
from nestpipe.adoption.undisturbed import undisturbed
from nestpipe.data.batch import Batch
from tests.support.adoption_cases import RULE, Scores, clicks, sgd
from tests.support.example_modules import example

bce = F.binary_cross_entropy_with_logits


def losses(model, steps=3, samples=9, **options):
    pipeline = NestPipeline(model, sgd, RULE, **{"micro_batches": 3, **options})
    batches = iter(clicks(samples=samples, steps=steps)())
    try:
        return [pipeline.progress(batches).loss for _ in range(steps)]
    finally:
        pipeline.close()


class Mixing(Scores):
    """The value of its loss is a mean over samples; ``term`` is not."""

    def __init__(self, term, **options):
        super().__init__(**options)
        self.term = term

    def loss(self, score, batch):
        return self.term(score, batch)


DETACHED = {
    "a straight-through term": lambda s, b: (bce(s, b.label), s.std())[0] + (s.std() - s.std().detach()) / len(s),
    "a loss divided by its own size": lambda s, b: bce(s, b.label) / bce(s, b.label).detach(),
    "a softmax over the batch, with the value of another loss": lambda s, b: (
        bce(s, b.label).detach() + F.softmax(s, 0)[0] - F.softmax(s, 0)[0].detach()
    ),
}


@pytest.mark.parametrize("name", DETACHED)
def test_a_gradient_that_mixes_samples_is_found_though_the_loss_does_not(name):
    with pytest.raises(NotSeparable, match=r"the gradient of .* is not the sum over its parts"):
        losses(Mixing(DETACHED[name]))


FINE = {
    "a straight-through term of each sample": lambda s, b: bce(s, b.label) + (s.tanh() - s.tanh().detach()).mean(),
    "a loss near 0": lambda s, b: (s - s.detach()).mean() + 1e-9 * bce(s, b.label),
    "a difference near 0": lambda s, b: bce(s, b.label) - bce(s, b.label).detach(),
    "a weight without a gradient in some batches": lambda s, b: s.square().mean(),
    "large numbers": lambda s, b: 1e12 * bce(s, b.label),
    "float64": lambda s, b: bce(s.double(), b.label.double()),
    "bfloat16 inside": lambda s, b: bce(s.bfloat16().float(), b.label),
}


@pytest.mark.parametrize("name", FINE)
def test_what_is_separable_passes(name):
    assert all(math.isfinite(loss) for loss in losses(Mixing(FINE[name])))


@pytest.mark.parametrize("samples", [64, 512])
@pytest.mark.parametrize("inside", [False, True], ids=["loss", "scores"])
def test_half_precision_hides_no_in_batch_softmax(samples, inside):
    """The larger the batch, the smaller the difference: log(512) and log(256) are 11 % apart."""

    def softmax(score, batch):
        score = (score + 1e-3 * batch.dense[:, 0]).bfloat16()
        value = F.cross_entropy(score[:, None] * score[None, :], torch.arange(len(score)))
        return value.float() if inside else value

    with pytest.raises(NotSeparable, match="in-batch negatives"):
        losses(Mixing(softmax), samples=samples)


# ---- dropout ----


class Attention(nn.Module):
    """Attention within each sample."""

    def __init__(self, function=None):
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, dropout=0.5, batch_first=True)
        self.function = function

    def forward(self, hidden):
        rows = hidden.view(len(hidden), 4, 2)
        rows = self.function(rows) if self.function else self.attention(rows, rows, rows)[0]
        return rows.reshape(len(hidden), 8)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, hidden):
        return self.inner(hidden[:, None])[0][:, 0]


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, hidden):
        return self.function(hidden, 0.5, True)


class OwnDropout(nn.Dropout):
    def forward(self, hidden):
        return hidden * (torch.rand_like(hidden) >= self.p) / (1 - self.p)


def sdpa(rows):
    return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5)


def sdpa_by_place(rows):
    return F.scaled_dot_product_attention(rows, rows, rows, None, 0.5)


DROPOUTS = {
    "nn.Dropout": lambda: nn.Dropout(0.5),
    "nn.AlphaDropout": lambda: nn.AlphaDropout(0.5),
    "a kind of nn.Dropout": lambda: OwnDropout(0.5),
    "F.dropout": lambda: Function(F.dropout),
    "F.alpha_dropout": lambda: Function(F.alpha_dropout),
    "torch.dropout": lambda: Function(torch.dropout),
    "attention": Attention,
    "attention by a function": lambda: Attention(sdpa),
    "attention by a function, by place": lambda: Attention(sdpa_by_place),
    "a recurrent network": Recurrent,
    "a transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 2)), nn.TransformerEncoderLayer(2, 1, 4, 0.5, batch_first=True), nn.Flatten()
    ),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_every_kind_of_dropout_trains_and_keeps_its_rate(name):
    torch.manual_seed(1)
    model = Scores(middle=DROPOUTS[name]())
    rates = [(m, getattr(m, "p", getattr(m, "dropout", None))) for m in model.modules()]
    before = torch.get_rng_state()
    found = losses(model)
    assert all(math.isfinite(loss) for loss in found)
    assert not torch.equal(before, torch.get_rng_state())  # training draws, with the rate that was given
    assert all(getattr(m, "p", getattr(m, "dropout", None)) is rate for m, rate in rates)


def test_attention_over_the_batch_is_refused():
    with pytest.raises(NotSeparable, match=r"batch_first=False"):
        losses(Scores(middle=nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8))))


RANDOM = {
    "noise": lambda hidden, p, training: hidden + 0.1 * torch.randn_like(hidden),
    "a choice by Python's generator": lambda hidden, p, training: hidden * random.random(),
    "a choice by NumPy's generator": lambda hidden, p, training: hidden * np.random.rand(),
    "rrelu": lambda hidden, p, training: F.rrelu(hidden, training=True),
}


@pytest.mark.parametrize("name", RANDOM)
def test_other_random_numbers_are_named_as_the_reason(name):
    with pytest.raises(NotSeparable, match="draws random numbers"):
        losses(Scores(middle=Function(RANDOM[name])))


# ---- state ----

BATCH_STATISTICS = {
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(8),
    "BatchNorm1d without running statistics": lambda: nn.BatchNorm1d(8, track_running_stats=False).eval(),
    "F.batch_norm": lambda: Function(lambda hidden, p, training: F.batch_norm(hidden, None, None, training=True)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "the mean of the last batch, in a buffer": lambda: LastMean(),
}


class LastMean(nn.Module):
    """The second pass over a batch leaves what the first one left."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(8))

    def forward(self, hidden):
        self.last.copy_(hidden.detach().mean(0))
        return hidden


@pytest.mark.parametrize("name", BATCH_STATISTICS)
def test_state_that_a_batch_leaves_needs_one_micro_batch(name):
    with pytest.raises(NotSeparable, match="micro_batches=1"):
        losses(Scores(middle=BATCH_STATISTICS[name]()))
    if name != "SyncBatchNorm":  # torch's works on GPUs only
        assert losses(Scores(middle=BATCH_STATISTICS[name]()), micro_batches=1)


def test_batch_norm_that_is_put_into_train_mode_later_is_refused_then():
    norm = nn.BatchNorm1d(8).eval()
    pipeline = NestPipeline(Scores(middle=norm), sgd, RULE, micro_batches=3, check=False)
    batches = iter(clicks(steps=9)())
    pipeline.progress(batches)
    norm.train()
    with pytest.raises(NotSeparable, match=r"net\.1 \(BatchNorm1d\)"):
        pipeline.progress(batches)
    pipeline.close()


class Keeping(nn.Module):
    """Keeps everything that a module may keep, and changes all of it in each pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.zeros(3))
        self.calls, self.seen, self.by_name = 0, [], {"n": torch.zeros(2), "list": [1]}
        self.some, self.last = {1}, deque(maxlen=2)
        self.array, self.held, self.generator = np.zeros(2), torch.ones(2), torch.Generator().manual_seed(3)

    def forward(self, hidden):
        self.calls += 1
        self.seen.append(self.calls)
        self.by_name["n"] += 1
        self.by_name["list"].append(2)
        self.some.add(self.calls)
        self.last.append(hidden)
        self.array += 1
        self.held.mul_(2)
        self.buffer.add_(1)
        self.made = torch.rand(2, generator=self.generator)
        random.random(), np.random.rand(), torch.rand(1)
        return hidden

    def state(self):
        kept = {n: v for n, v in vars(self).items() if not n.startswith("_") or n == "_buffers"}
        generators = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        return repr(kept), self.generator.get_state().tolist(), generators


def test_a_pass_leaves_no_trace():
    model = Keeping()
    before, objects = model.state(), dict(vars(model))
    with undisturbed(model):
        for _ in range(2):
            model(torch.ones(4))
    changed = lambda state: [a == b for a, b in zip(state, before, strict=True)]  # noqa: E731
    assert changed(model.state()) == [True] * 3
    assert all(vars(model)[name] is value for name, value in objects.items())
    model(torch.ones(4))
    assert not any(changed(model.state()))


# ---- later looks ----


def test_which_micro_batches_are_looked_at():
    """One of each of the first 8 batches, another one each time, and then of the 16th, the 32nd and every 64th."""

    def looked(sizes, micro_batches=4):
        looks, found = Looks(micro_batches), []
        for number, samples in enumerate(sizes):
            batch = Batch({}, torch.arange(samples), {}, form=object())
            for m, part in enumerate(p for p in batch.split(micro_batches) if len(p)):
                if looks.is_due(part):
                    found.append((number, m))
                    looks.looked()
        return found

    assert looked([8] * 140) == [(b, b % 4) for b in range(8)] + [(16, 1), (32, 2), (64, 0), (128, 0)]
    assert looked([1, 1, 8]) == [(2, 0)]  # a single sample has nothing to be compared with
    assert looked([2] * 3) == [(b, 0) for b in range(3)]  # two samples are in one part


def test_a_look_costs_no_random_numbers_and_no_bits():
    torch.manual_seed(5)
    one = losses(Scores(middle=nn.Dropout(0.5)), steps=5, check=True)
    torch.manual_seed(5)
    assert losses(Scores(middle=nn.Dropout(0.5)), steps=5, check=False) == one


def test_the_readmes_example_of_a_token_mean_is_the_plain_mean(capsys):
    token_mean = example("token_mean")
    torch.manual_seed(1)
    model, wanted = token_mean.NextItem(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for batch in token_mean.batches(0, 20):
        loss = model(batch)
        mean = loss.total / loss.count
        mean.backward()
        wanted.append(float(mean.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert token_mean.main(steps=20) == pytest.approx(wanted, rel=1e-4) and wanted[-1] < wanted[0]
    assert "step 20: loss" in capsys.readouterr().out
