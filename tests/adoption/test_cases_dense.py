"""Dense weights as under DistributedDataParallel: starts, gradients, optimizers, frozen parts. Against a plain loop."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torchrec")

from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests.support.adoption_cases import (
    DIM,
    Case,
    Scores,
    as_expected,
    bags,
    clicks,
    rank,
    verdict,
)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def plus(**modules):
    """Scores with more modules, which its forward does not use."""

    class Model(Scores):
        def __init__(self):
            super().__init__()
            for name, make in modules.items():
                setattr(self, name, make())

    return Model


class Half(Scores):
    def __init__(self):
        super().__init__()
        self.net = self.net.bfloat16()

    def score(self, batch):
        return self.net(torch.cat([self.pooled(batch), batch.dense], 1).bfloat16()).squeeze(1).float()


class Mixed(Scores):
    """Dense weights of three types."""

    def __init__(self):
        super().__init__()
        self.wide, self.low = nn.Linear(3, 1).double(), nn.Linear(3, 1).bfloat16()

    def score(self, batch):
        more = self.wide(batch.dense.double()).float() + self.low(batch.dense.bfloat16()).float()
        return super().score(batch) + more.squeeze(1)


class OnlyTables(nn.Module):
    """Matrix factorisation: no weight outside the tables."""

    def __init__(self):
        super().__init__()
        self.ebc = bags()

    def forward(self, batch):
        found = self.ebc(batch.sparse)
        score = (found["a"] * found["b"]).sum(1)
        return nn.functional.binary_cross_entropy_with_logits(score, batch.label), score


def frozen(*names):
    class Model(Scores):
        def __init__(self):
            super().__init__()
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(not any(name.startswith(one) for one in names))

    return Model


class Experts(Scores):
    """A weight that only some steps use, and on one of two ranks."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 1) for _ in range(3))

    def score(self, batch):
        return super().score(batch) + self.experts[batch.extra](batch.dense).squeeze(1)


class Twice(Scores):
    """One weight under two names."""

    def __init__(self):
        super().__init__()
        self.again = self.net[2]

    def score(self, batch):
        return super().score(batch) + self.again(self.net[0](torch.cat([self.pooled(batch), batch.dense], 1))).squeeze(
            1
        )


class Small(Scores):
    """A small table outside the collections."""

    sparse = False

    def __init__(self):
        super().__init__(width=3 * DIM)
        self.small = nn.EmbeddingBag(20, DIM, mode="sum", sparse=self.sparse)

    def pooled(self, batch):
        ids = (batch.dense[:, :2].abs() * 5).long().clamp(max=19)
        return torch.cat([super().pooled(batch), self.small(ids)], 1)


class SmallSparse(Small):
    sparse = True


class Checkpointed(Scores):
    def score(self, batch):
        return checkpoint(self.net, torch.cat([self.pooled(batch), batch.dense], 1), use_reentrant=False).squeeze(1)


class Held(Scores):
    """Holds what cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Hooked(Scores):
    """A hook on a weight's gradient, which autograd runs once for each micro-batch."""

    def __init__(self):
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)


def stepping(prepare):
    """A model whose weights outside the tables are given to ``prepare``."""

    def make():
        model = Scores()
        for weight in model.net.parameters():
            prepare(weight)
        return model

    return make


class Normed(Scores):
    def __init__(self):
        super().__init__()
        self.net[0] = nn.utils.parametrizations.weight_norm(self.net[0])


def unfreeze(step, model, optimizer):
    """The network learns from the third step on."""
    if step == 1:
        model.net.requires_grad_(True)


def clipped(parameters):
    class Clipped(torch.optim.SGD):
        def step(self, closure=None):
            nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
            return super().step(closure)

    return Clipped(parameters, lr=0.5)


def keyed_optimizer(parameters):
    named = {str(n): p for n, p in enumerate(parameters)}
    return KeyedOptimizerWrapper(named, lambda found: torch.optim.SGD(found, lr=0.5))


def torchrec_clipped(parameters):
    return GradientClippingOptimizer(keyed_optimizer(parameters), clipping=GradientClipping.NORM, max_gradient=0.05)


def torchrec_warm(parameters):
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4, value=0.1)]
    return WarmupOptimizer(keyed_optimizer(parameters), stages, lr=0.5)


def grouped(parameters):
    weights, biases = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}], lr=0.01
    )


def decayed(step, model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def cleared(set_to_none):
    return lambda step, model, optimizer: optimizer.zero_grad(set_to_none=set_to_none)


def on_meta():
    model = Scores()
    model.net = model.net.to("meta")
    return model


EQUAL = {
    "optimizer.zero_grad()": Case(Scores, clicks(), each=cleared(True)),
    "optimizer.zero_grad(set_to_none=False)": Case(Scores, clicks(), each=cleared(False)),
    "model.zero_grad()": Case(Scores, clicks(), each=lambda step, model, optimizer: model.zero_grad()),
    "an unused weight with weight decay": Case(plus(spare=lambda: nn.Linear(4, 4)), clicks(), dense=adamw),
    "weights that some steps use": Case(Experts, clicks(lambda i, n, g: i % 3), dense=adamw),
    "weights that one rank uses": Case(Experts, clicks(lambda i, n, g: rank()), dense=adamw),
    "a frozen weight": Case(frozen("net.0.weight"), clicks(), dense=adamw),
    "a frozen table": Case(frozen("ebc.embedding_bags.t_a"), clicks()),
    "all tables frozen": Case(frozen("ebc"), clicks()),
    "all but the tables frozen": Case(frozen("net"), clicks()),
    "frozen, then not": Case(frozen("net"), clicks(), each=unfreeze),
    "bfloat16": Case(Half, clicks(), tolerance=0.03),
    "three types": Case(Mixed, clicks(), tolerance=0.02),
    "no dense part": Case(OnlyTables, clicks()),
    "one weight, two names": Case(Twice, clicks()),
    "a small table outside": Case(Small, clicks()),
    "the same with sparse gradients": Case(SmallSparse, clicks()),
    "activation checkpointing": Case(Checkpointed, clicks()),
    "a lock in the model": Case(Held, clicks()),
    "a hook on a gradient, one micro-batch": Case(Hooked, clicks(), options={"micro_batches": 1}),
    "a parametrised weight": Case(Normed, clicks()),
    "clipped by a subclass": Case(Scores, clicks(), dense=clipped),
    "clipped by torchrec": Case(Scores, clicks(), dense=torchrec_clipped),
    "warmed up by torchrec": Case(Scores, clicks(), dense=torchrec_warm),
    "parameter groups": Case(Scores, clicks(), dense=grouped),
    "a learning rate that falls": Case(Scores, clicks(), each=decayed),
    "uneven ranks": Case(Scores, clicks(samples=[16, 4])),
    "uneven ranks, the mean of the ranks' means": Case(Scores, clicks(samples=[16, 4]), options={"average": "ranks"}),
}

REFUSED = {
    "a hook on a gradient": Case(Hooked, clicks(), "'net.0.weight' has a hook on its gradient"),
    "a hook after a gradient": Case(
        stepping(lambda p: p.register_post_accumulate_grad_hook(lambda q: None)), clicks(), "dense_optimizer="
    ),
    "an optimizer in the backward pass": Case(
        stepping(lambda p: apply_optimizer_in_backward(torch.optim.SGD, [p], {"lr": 0.1})), clicks(), "dense_optimizer="
    ),
    "tables in double": Case(lambda: Scores().double(), clicks(), "float64"),
    "an optimizer with a closure": Case(
        Scores, clicks(), "closure", dense=lambda parameters: torch.optim.LBFGS(parameters)
    ),
    "an optimizer instead of a factory": Case(
        Scores, clicks(), "function", dense=torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    ),
    "dense weights on the meta device": Case(on_meta, clicks(), "meta device"),
}


@pytest.mark.parametrize("name", [*EQUAL, *REFUSED])
def test_dense_weights(name):
    case = (EQUAL | REFUSED)[name]
    said = verdict(case)
    assert as_expected(case, said), said


ON_TWO = ("optimizer.zero_grad()", "weights that one rank uses", "no dense part", "uneven ranks")
ON_TWO += ("uneven ranks, the mean of the ranks' means",)


def verdicts(names) -> dict[str, str]:
    return {name: verdict(EQUAL[name]) for name in names}


@pytest.mark.parametrize("names", [ON_TWO, pytest.param(tuple(EQUAL), marks=pytest.mark.slow)], ids=["some", "all"])
def test_on_two_ranks(pool2, names):
    for said in pool2.run(verdicts, names):
        assert {name: what for name, what in said.items() if not as_expected(EQUAL[name], what)} == {}
