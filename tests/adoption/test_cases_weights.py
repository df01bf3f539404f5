"""The first values of dense weights, copies of a model, and the optimizer, in a user's own loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("torchrec")

from nestpipe.adoption.pipeline import NestPipeline
from nestpipe.trainer import SparseOptimizer
from tests.support.adoption_cases import DIM, ROWS, RULE, Scores, bags, clicks, rank, sgd


class OnlyTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.ebc = bags()

    def forward(self, batch):
        return (self.ebc(batch.sparse).values().sum(1) - batch.label).square().mean()


class Counting(Scores):
    """Buffers of several types, other ones on each rank."""

    def __init__(self):
        super().__init__()
        for name, value in (("scale", 2.0), ("on", True), ("count", 3)):
            self.register_buffer(
                name, torch.tensor([value]) * (1 + rank()) if name != "on" else torch.tensor([rank() == 0])
            )

    def score(self, batch):
        return super().score(batch) * self.scale * self.count * self.on


def unseeded() -> tuple[list[float], list[torch.Tensor]]:
    """Each rank draws its own weights, as a program without a seed does."""
    with torch.random.fork_rng():
        torch.manual_seed(100 + rank())
        model = Counting()
    pipeline = NestPipeline(model, sgd, RULE, micro_batches=2)
    batches = iter(clicks()())
    losses = [pipeline.progress(batches).global_loss for _ in range(3)]
    found = [value.detach().clone() for value in (*model.parameters(), *model.buffers())]
    pipeline.close()
    return losses, found


def unseeded_replicas() -> list[torch.Tensor]:
    """Tables that are whole on each rank, which draws its own."""
    with torch.random.fork_rng():
        torch.manual_seed(100 + rank())
        model = Scores()
    pipeline = NestPipeline(model, sgd, RULE, micro_batches=2, method="nestpipe+2d-sp")
    batches = iter(clicks()())
    for _ in range(3):
        pipeline.progress(batches)
    found = [pipeline.trainer.table(name).clone() for name in ("t_a", "t_b")]
    pipeline.close()
    return found


def test_replicas_of_tables_start_equal_without_a_common_seed(pool2):
    one, other = pool2.run(unseeded_replicas)
    assert len(one) == 2 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_interrupt_in_the_first_pass_gives_the_model_back():
    class Interrupted(Scores):
        calls = 0

        def forward(self, batch):
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return super().forward(batch)

    model = Interrupted()
    pipeline, batches = NestPipeline(model, sgd, RULE, micro_batches=2), iter(clicks()())
    with pytest.raises(KeyboardInterrupt):
        pipeline.progress(batches)
    assert set(model.ebc.embedding_bags) == {"t_a", "t_b"}
    model.calls = 2
    assert pipeline.progress(batches).step == 0
    pipeline.close()


def test_ranks_without_a_common_seed_train_rank_0s_weights(pool2):
    (losses, weights), (others, same) = pool2.run(unseeded)
    assert losses == others and len(weights) == len(same) >= 7
    assert all(torch.equal(one, other) for one, other in zip(weights, same, strict=True))
    assert [float(value) for value in weights[-3:]] == [2.0, 1.0, 3.0]


def test_copies_of_the_model_during_training():
    """Averages of weights and deep copies, as people keep them while they train."""
    model = Scores()
    pipeline = NestPipeline(model, sgd, RULE, micro_batches=2)
    batches = iter(clicks()())
    pipeline.progress(batches)
    average = torch.optim.swa_utils.AveragedModel(model)
    twin = copy.deepcopy(model)
    pipeline.progress(batches)
    average.update_parameters(model)
    assert not torch.equal(twin.net[0].weight, model.net[0].weight)
    with pytest.raises(RuntimeError, match="export"):
        twin(next(clicks()()))
    pipeline.close()


def test_the_optimizer_is_there_before_the_first_batch_with_names():
    seen = {}

    def named(parameters):
        seen.update(parameters.named)
        return torch.optim.SGD(parameters, lr=0.2)

    model = Scores()
    pipeline = NestPipeline(model, named, RULE, micro_batches=2)
    assert list(seen) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    schedule = torch.optim.lr_scheduler.ExponentialLR(pipeline.optimizer, 0.5)
    batches = iter(clicks()())
    for _ in range(2):
        pipeline.progress(batches)
        schedule.step()
    assert pipeline.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert NestPipeline(OnlyTables(), sgd, RULE).optimizer is None
    pipeline.close()


def first_rows(**options) -> torch.Tensor:
    """Of a table on the meta device, after a step that changes nothing."""
    pipeline = NestPipeline(
        Scores(bags(device="meta", **options)), sgd, SparseOptimizer("sgd", lr=0.0), micro_batches=2
    )
    pipeline.progress(iter(clicks()()))
    rows = pipeline.trainer.table("t_a").clone()
    pipeline.close()
    return rows


def test_tables_on_the_meta_device_start_as_their_configs_say():
    usual, limits = first_rows(), first_rows(weight_init_min=0.5, weight_init_max=0.6)
    assert 0.1 < usual.abs().max() <= ROWS**-0.5 and 0.5 <= limits.min() < limits.max() <= 0.6
    assert torch.equal(first_rows(init_fn=lambda rows: nn.init.constant_(rows, 0.25)), torch.full((ROWS, DIM), 0.25))
    normal = first_rows(init_fn=lambda rows: nn.init.normal_(rows, std=3.0))
    assert 2.0 < normal.std() < 4.0 and torch.equal(
        normal, first_rows(init_fn=lambda rows: nn.init.normal_(rows, std=3.0))
    )
