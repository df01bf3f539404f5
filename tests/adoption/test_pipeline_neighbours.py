"""What is next to progress(): outputs, the optimizer, export, detach, copies, a second pipeline, a second call."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("torchrec")

from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from nestpipe.adoption import NestPipeline, NotSeparable
from tests.support.adoption_cases import RULE, Scores, clicks, sgd


def pipeline_of(model=None, **options):
    return NestPipeline(model or Scores(), sgd, RULE, **{"micro_batches": 3, **options})


def first_batch():
    return next(iter(clicks()()))


# ---- outputs ----


@dataclass
class Scored:
    score: torch.Tensor
    rows: JaggedTensor


class Named(NamedTuple):
    score: torch.Tensor
    nothing: None


class Many(Scores):
    """Returns a score for each sample in many structures; what it is follows from the batch."""

    def forward(self, batch):
        score = batch.dense[:, 0] + 0 * self.score(batch)
        counts = (batch.label + 1).long()
        rows = JaggedTensor(values=torch.repeat_interleave(score, counts), lengths=counts)
        pooled = KeyedTensor(["x", "y"], [1, 2], torch.stack([score, 2 * score, 3 * score], 1))
        names = [f"{value:.4f}" for value in score.tolist()]
        return self.loss(self.score(batch), batch), {
            "one": score,
            "both": (score[:, None], [score, Named(score, None)]),
            "class": Scored(score, rows),
            "pooled": pooled,
            "names": names,
            "scalar": score.sum(),
        }


@pytest.mark.parametrize("clustering", [False, True])
def test_outputs_are_whole_detached_and_in_the_batchs_order(clustering):
    torch.manual_seed(1)
    batches = list(clicks(steps=3, samples=10)())
    pipeline = pipeline_of(Many(), clustering=clustering)
    source = iter(batches)
    for batch in batches:
        pipeline.progress(source)
        wanted, found, pieces = batch.dense[:, 0], pipeline.output, pipeline.outputs
        counts = (batch.label + 1).long()
        same = [found["one"], found["both"][0].squeeze(1), *found["both"][1][:1], found["both"][1][1].score]
        same += [found["class"].score, found["pooled"]["x"].squeeze(1), torch.cat([p["one"] for p in pieces])]
        same += [torch.cat([piece["pooled"]["y"][:, 0] for piece in pieces]) / 2]
        for tensor in same:
            assert torch.allclose(tensor, wanted) and not tensor.requires_grad
        assert found["class"].rows.lengths().tolist() == counts.tolist()
        assert torch.allclose(found["class"].rows.values(), torch.repeat_interleave(wanted, counts))
        assert found["names"] == [f"{value:.4f}" for value in wanted.tolist()]
        assert len(found["scalar"]) == 3 and not found["class"].rows.values().requires_grad  # one for each micro-batch
        assert [len(piece["names"]) for piece in pieces] == [4, 3, 3]
    pipeline.close()


@pytest.mark.parametrize("others", [0, 1, 2])
def test_what_else_is_returned(others):
    class Model(Scores):
        def forward(self, batch):
            loss, score = super().forward(batch)
            return (loss, *[score] * others) if others else loss

    pipeline = pipeline_of(Model())
    assert pipeline.output is None and pipeline.outputs == []
    pipeline.progress(iter(clicks()()))
    found = pipeline.output
    assert [len(part) for part in (found if others == 2 else [found] * others)] == [9] * others
    pipeline.close()


# ---- before the first step, and refusals ----


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
@pytest.mark.parametrize("after", [0, 2])
def test_progress_only_trains_and_reads_nothing_otherwise(mode, after):
    model, read = Scores(), []
    batches = (read.append(n) or batch for n, batch in enumerate(clicks(steps=12)()))
    pipeline = pipeline_of(model)
    for _ in range(after):
        pipeline.progress(batches)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    table = pipeline.trainer.table("t_a").clone() if after else None
    asked = len(read)
    model.train(mode != "eval")
    contexts = {"eval": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with contexts[mode](), pytest.raises(RuntimeError, match=r"pipeline\.export\(\)"):
        pipeline.progress(batches)
    assert after or len(read) == asked == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.train()
    assert not after or torch.equal(table, pipeline.trainer.table("t_a"))
    assert pipeline.progress(batches).step == after
    pipeline.close()


def test_a_refused_model_is_as_before_and_a_second_call_meets_the_same_batch():
    class Moody(Scores):
        mixes = True

        def loss(self, score, batch):
            return super().loss(score, batch) * (score.std() if self.mixes else 1)

    model = Moody()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parameters, batches, pipeline = list(model.parameters()), iter(clicks(steps=2)()), pipeline_of(model)
    for _ in range(2):
        with pytest.raises(NotSeparable):
            pipeline.progress(batches)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
        model(first_batch())[0].backward()  # its own collections work
    model.mixes = False
    assert [pipeline.progress(batches).samples for _ in range(2)] == [9, 9]
    with pytest.raises(StopIteration):
        pipeline.progress(batches)
    pipeline.close()


def test_the_optimizer_is_there_at_once_with_the_models_names():
    model, named = Scores(), {}

    def factory(parameters):
        named.update(parameters.named)
        return torch.optim.AdamW(parameters, lr=0.1)

    pipeline = NestPipeline(model, factory, RULE, micro_batches=2)
    assert list(named) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    assert all(named[name] is p for name, p in model.net.named_parameters(prefix="net"))
    schedule = torch.optim.lr_scheduler.LambdaLR(pipeline.optimizer, lambda step: 0.0 if step else 1.0)
    batches = iter(clicks()())
    pipeline.progress(batches)
    schedule.step()
    before = model.net[0].weight.detach().clone()
    pipeline.progress(batches)
    assert torch.equal(before, model.net[0].weight)
    pipeline.close()


# ---- export, detach, copies ----


class Locked(Scores):
    """Holds what cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock, self.inside = threading.Lock(), {"lock": threading.RLock(), "n": 1}
        self.group = dist.group.WORLD if dist.is_initialized() else None

    def forward(self, batch):
        with self.lock:
            loss, self.score_before = super().forward(batch)
        return loss, self.score_before


def export_and_detach() -> bool:
    torch.manual_seed(2)
    model = Locked()
    names, weights = list(model.state_dict()), {name: p for name, p in model.named_parameters()}
    pipeline = pipeline_of(model)
    batches = iter(clicks(steps=4)())
    for _ in range(3):
        pipeline.progress(batches)
    exported = pipeline.export()
    twin = copy.deepcopy(pipeline.export().state_dict())
    detached = pipeline.detach()
    again = pipeline.export()
    assert detached is model and list(model.state_dict()) == list(twin) == names
    assert all(p is weights[name] for name, p in model.named_parameters())
    states = (exported.state_dict(), again.state_dict(), twin)
    assert all(torch.equal(value, state[name]) for state in states for name, value in model.state_dict().items())
    model(first_batch())[0].backward()  # usable
    assert weights["ebc.embedding_bags.t_a.weight"].grad is not None
    return exported.lock is model.lock and exported.inside["lock"] is model.inside["lock"]


def test_export_and_detach_of_a_model_with_locks():
    assert export_and_detach()


def test_the_same_on_two_ranks(pool2):
    assert pool2.run(export_and_detach) == [True, True]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_detached_model_can_be_trained_by_another_pipeline(device):
    model = Scores()
    model.ebc.to(device) if device == "cpu" else model.ebc.to_empty(device=device)
    for seed in range(2):
        pipeline = pipeline_of(model, seed=seed)
        pipeline.progress(iter(clicks(steps=1)()))
        assert pipeline.detach() is model is pipeline.detach()
        assert torch.isfinite(model(first_batch())[0])


ENDED = {
    "progress after detach": ("detach", lambda p, b: p.progress(b), r"ended by detach\(\)"),
    "progress after close": ("close", lambda p, b: p.progress(b), r"ended by close\(\)"),
    "detach after close": ("close", lambda p, b: p.detach(), "was closed"),
    "export after close": ("close", lambda p, b: p.export(), "was closed"),
    "a model that is being trained": ("", lambda p, b: p._model(first_batch()), r"pipeline\.progress"),
    "its tables": ("", lambda p, b: p._model.ebc.embedding_bags, r"pipeline\.trainer\.table"),
    "a second pipeline": ("", lambda p, b: pipeline_of(p._model), "another NestPipeline.*detach"),
}


@pytest.mark.parametrize("name", ENDED)
def test_what_cannot_be_done_is_said_in_a_line(name):
    ended, act, message = ENDED[name]
    pipeline, batches = pipeline_of(), iter(clicks()())
    pipeline.progress(batches)
    if ended:
        getattr(pipeline, ended)()
    with pytest.raises((RuntimeError, ValueError), match=message) as caught:
        act(pipeline, batches)
    assert "\n" not in str(caught.value)
    pipeline.close()


def test_two_pipelines_on_one_model_before_either_has_begun():
    model = Scores()
    one, other = pipeline_of(model), pipeline_of(model)
    one.progress(iter(clicks()()))
    with pytest.raises(ValueError, match="another NestPipeline"):
        other.progress(iter(clicks()()))
    one.close()


def test_detach_after_a_failure_is_refused():
    pipeline, batches = pipeline_of(), iter([first_batch(), {"no": "batch"}])
    with pytest.raises(ValueError, match="batch"):
        for _ in range(2):
            pipeline.progress(batches)
    with pytest.raises(RuntimeError, match="ended with BatchError"):
        pipeline.detach()
    pipeline.close()


def test_averaged_copies_follow_the_dense_weights():
    model = Scores()
    pipeline, batches = pipeline_of(model), iter(clicks(steps=4)())
    pipeline.progress(batches)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    wanted = model.net[0].weight.detach().clone()
    for step in range(3):
        pipeline.progress(batches)
        ema.update_parameters(model)
        wanted = model.net[0].weight.detach().clone() if step == 0 else (wanted + model.net[0].weight.detach()) / 2
    torch.testing.assert_close(ema.module.net[0].weight.detach(), wanted)
    with pytest.raises(RuntimeError, match=r"pipeline\.export\(\)"):
        ema(first_batch())
    assert isinstance(copy.deepcopy(model).net, nn.Sequential)
    pipeline.close()
