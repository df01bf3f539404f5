"""Dense weights and their gradients in the engine: what is left between steps, what is frozen, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.data.batch import Batch
from nestpipe.engine.engine import Engine
from nestpipe.schedule.templates import nestpipe
from nestpipe.trainer import ModelSpec, SparseOptimizer
from tests.support.engine_runs import SPEC, TABLES, Scorer, Setting, add_weights, differences, train

SETTING = Setting("sgd", "sgd", steps=6, samples=6)


class EverySecond(torch.optim.SGD):
    """Steps every second time, and keeps the gradients in between, as torchrec's GradientAccumulationWrapper."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls % 2 == 0:
            super().step(closure)

    def zero_grad(self, set_to_none=True):
        if self.calls % 2 == 0:
            super().zero_grad(set_to_none)


class Doubled:
    """Half the rate on gradients that its step doubles; it has no ``zero_grad``, and clears before it steps again."""

    def __init__(self, parameters):
        self.parameters = parameters

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            p.grad.mul_(2.0)
            p.sub_(p.grad, alpha=0.05)
            p.grad = None

    def state_dict(self):
        return {"state": {}}


def run(dense: Callable[[list[nn.Parameter]], object], between=lambda model: None, spec: ModelSpec = SPEC):
    """``between`` is called with the model before each step."""
    torch.set_num_threads(1)
    models: list[nn.Module] = []

    def build(embeddings: nn.Module) -> nn.Module:
        models.append(spec.build(embeddings))
        return models[0]

    engine = Engine(nestpipe(2), replace(spec, build=build), SETTING.sparse_optimizer, dense, 3)
    try:
        batches, outcome = iter(SETTING.batches(0)), None
        for _ in range(SETTING.steps):
            between(models[0])
            outcome = train(engine, batches, 1 + len(outcome.losses) if outcome else 1, outcome)
            assert all(p.grad is None for p in models[0].parameters())
        return add_weights(outcome, engine)
    finally:
        engine.close()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_gradients_that_a_caller_leaves_between_steps_are_not_trained() -> None:
    def leave(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    usual = run(sgd)
    assert differences(run(sgd, leave), usual) == []
    assert differences(run(Doubled), usual) == []


def test_gradients_that_an_optimizers_zero_grad_keeps_are_accumulated() -> None:
    """A plain loop on the engine's own gradients: rate 0.1 on the sum of two batches' gradients."""
    seen: list[list[Tensor]] = []

    class Watched(EverySecond):
        def step(self, closure=None):
            seen.append([p.grad.clone() for p in self.param_groups[0]["params"]])
            super().step(closure)

    def rows_stay(spec: ModelSpec) -> ModelSpec:
        return replace(spec, tables=tuple(replace(table, frozen=True) for table in TABLES))

    end = run(lambda parameters: Watched(parameters, lr=0.1), spec=rows_stay(SPEC))
    start = Scorer(nn.Module())
    for before, both in zip(seen[::2], seen[1::2], strict=True):
        for parameter, first, total in zip(start.parameters(), before, both, strict=True):
            assert not torch.allclose(total, first)
            parameter.data -= 0.1 * total
    for name, value in start.named_parameters():
        assert torch.allclose(end.tensors[f"dense {name}"], value, atol=1e-6)
    # The second of a pair holds the first: without accumulation it is another sum.
    alone: list[list[Tensor]] = []

    class Single(torch.optim.SGD):
        def step(self, closure=None):
            alone.append([p.grad.clone() for p in self.param_groups[0]["params"]])

    run(lambda parameters: Single(parameters, lr=0.1), spec=rows_stay(SPEC))
    for first, second, both in zip(alone[0], alone[1], seen[1], strict=True):
        assert torch.allclose(first + second, both, atol=1e-6)


@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam"])
def test_no_rule_changes_a_frozen_table(rule: str) -> None:
    """Also with eps 0: a zero gradient then gives 0 / 0."""
    tables = (TABLES[0], replace(TABLES[1], frozen=True))
    build = replace(SPEC, tables=tables)
    engine = Engine(nestpipe(2), build, SparseOptimizer(rule, lr=0.1, eps=0.0), SETTING.dense_optimizer, 3)
    try:
        before = {table.name: engine.table(table.name).clone() for table in tables}
        train(engine, iter(SETTING.batches(0)), None)
        assert torch.equal(engine.table("user"), before["user"]) and not engine.row_state("user").any()
        assert not torch.equal(engine.table("item"), before["item"])
    finally:
        engine.close()


class Returning(Scorer):
    """Returns what ``made`` makes of its losses."""

    made: Callable[[Scorer, Tensor], object]

    def forward(self, batch: Batch):
        return type(self).made(self, super().forward(batch))


@pytest.mark.parametrize(
    ("made", "divide_by", "message"),
    [
        (lambda m, x: (x.mean(), x), "samples", "returned a tuple instead of a tensor of losses"),
        (lambda m, x: x.mean(), "samples", r"losses of shape \(\) for 3 samples: return one per sample"),
        (lambda m, x: x.sum(), "count", r"returns \(sum of losses, count\), two scalar tensors"),
        (lambda m, x: (x, torch.ones(len(x))), "count", r"returns \(sum of losses, count\), two scalar tensors"),
        (lambda m, x: (x.sum(), 3), "count", r"returns \(sum of losses, count\), two scalar tensors"),
        (lambda m, x: (x.sum(), m.score.weight.sum()), "count", "depends on weights: detach it"),
    ],
)
def test_a_model_that_returns_something_else_is_refused(made, divide_by, message: str) -> None:
    build = type("Made", (Returning,), {"made": made})
    with pytest.raises(ValueError, match=message):
        run(sgd, spec=ModelSpec(TABLES, build, divide_by=divide_by))


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    class Needs(torch.optim.SGD):
        def step(self, closure):
            super().step(closure)

    for optimizer in (torch.optim.LBFGS, lambda parameters: Needs(parameters, lr=0.1)):
        with pytest.raises(ValueError, match=r"cannot do: use one whose step\(\) needs no closure"):
            run(optimizer)


def refusals() -> list[str]:
    """On each rank: why models that differ by rank, or that hold a sparse buffer, are refused."""
    rank = dist.get_rank()

    class Wider(Scorer):
        def __init__(self, embeddings: nn.Module) -> None:
            super().__init__(embeddings)
            self.more = nn.Linear(2 + rank, 1)

    class Named(Scorer):
        def __init__(self, embeddings: nn.Module) -> None:
            super().__init__(embeddings)
            self.register_buffer(f"of_rank_{rank}", torch.ones(1))

    class Graph(Scorer):
        def __init__(self, embeddings: nn.Module) -> None:
            super().__init__(embeddings)
            self.register_buffer("graph", torch.eye(3).to_sparse())

    said = []
    for build in (Wider, Named, Graph):
        try:
            run(sgd, spec=ModelSpec(TABLES, build))
        except ValueError as error:
            said.append(str(error))
    return said


def test_models_that_differ_by_rank_are_refused_on_all_ranks(pool2) -> None:
    for said in pool2.run(refusals):
        assert (
            said[:2]
            == [
                "the model of rank 1 has other weights or buffers than that of rank 0 (names, shapes or types): "
                "build the same model on all ranks"
            ]
            * 2
        )
        assert said[2].startswith("'graph' is a sparse tensor") and len(said) == 3


def test_a_load_drops_what_an_optimizer_kept() -> None:
    """After a load, the gradients of batches before it are in no step."""
    engine = Engine(nestpipe(2), SPEC, SETTING.sparse_optimizer, lambda p: EverySecond(p, lr=0.1), 3)
    try:
        start = copy.deepcopy(engine.state_dict())
        train(engine, iter(SETTING.batches(0)), 1)  # its gradients are kept, and no dense weight has changed
        engine.load_state_dict(start)
        train(engine, iter(SETTING.batches(0)), 1)
        once = {name: value.clone() for name, value in engine.dense_state().items()}
    finally:
        engine.close()
    usual = Engine(nestpipe(2), SPEC, SETTING.sparse_optimizer, sgd, 3)
    try:
        train(usual, iter(SETTING.batches(0)), 1)
        assert all(torch.equal(value, once[name]) for name, value in usual.dense_state().items())
    finally:
        usual.close()
