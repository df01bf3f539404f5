"""What a loss is divided by, on one and two ranks: four divisors, replica groups, and a count that A sums."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from baselines.registry import NESTPIPE_TWO_D_SP, NESTPIPE_TWO_D_SP_EXACT, UNIEMB
from nestpipe.checker.rules import check
from nestpipe.data.batch import Batch
from nestpipe.engine.engine import Engine
from nestpipe.engine.lanes import OneAtATime
from nestpipe.engine.thread_lanes import ThreadLanes
from nestpipe.methods import BUILT_IN, Method
from nestpipe.schedule.building import counted, op, schedule
from nestpipe.schedule.operations import Schedule
from nestpipe.schedule.templates import nestpipe, serial
from nestpipe.schedule.text import parse, to_text
from nestpipe.trainer import DivideBy, ModelSpec
from tests.support.engine_runs import (
    TABLES,
    CountingScorer,
    Outcome,
    Scorer,
    Setting,
    add_weights,
    differences,
    jitter,
    make_batches,
)

SETTING = Setting("sgd", "sgd", steps=8, samples=9)


class Weighted(Scorer):
    """One loss per sample, times a weight that the batch brings."""

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) * batch.extra["weight"]


def data(rank: int, ranks: int, divide_by: DivideBy) -> list[Batch]:
    """Uneven batches. The ``weight`` of a sample makes the sum over samples / samples what ``divide_by`` means.

    No label of batch 2 is counted on any rank.
    """
    everyone = [make_batches(SETTING.steps, r, samples=SETTING.samples, uneven=True) for r in range(ranks)]
    for batches in everyone:
        if len(batches) > 2:
            batches[2].extra["label"].abs_().neg_()
    for step, batch in enumerate(everyone[rank]):
        of_all = [batches[step] for batches in everyone if step < len(batches)]
        samples = sum(map(len, of_all))
        positive = sum(float((other.extra["label"] > 0).sum()) for other in of_all)
        batch.extra["weight"] = {
            "samples": torch.ones(len(batch)),
            "rank_samples": torch.full((len(batch),), samples / max(len(batch), 1) / ranks),
            "ranks": torch.full((len(batch),), samples / ranks),
            "count": (batch.extra["label"] > 0) * (samples / max(positive, 1.0)),
        }[divide_by]
    return everyone[rank]


def run(method: Schedule, build: type[nn.Module], divide_by: DivideBy, groups: int = 1, overlap: bool = True):
    """The outcome on this rank, and the losses of the global batch."""
    torch.set_num_threads(1)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    kind = data(rank, ranks, "count" if build is CountingScorer else divide_by)
    spec = ModelSpec(TABLES, build, divide_by="samples" if build is Weighted else divide_by)
    lanes = partial(ThreadLanes, delay=jitter(rank)) if overlap else OneAtATime
    engine = Engine(method, spec, SETTING.sparse_optimizer, SETTING.dense_optimizer, 3, lanes, replica_groups=groups)
    outcome, whole = Outcome(), []
    try:
        batches = iter(kind)
        while True:
            try:
                result = engine.progress(batches)
            except StopIteration:
                return add_weights(outcome, engine), whole
            outcome.losses.append(result.loss)
            outcome.samples.append(result.samples)
            whole.append(result.global_loss)
    finally:
        engine.close()


def far(one: Outcome, other: Outcome) -> list[str]:
    """Names of what differs by more than rounding."""
    names = [
        n
        for n, (a, b) in enumerate(zip(one.losses, other.losses, strict=True))
        if not math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)
    ]
    return [f"losses {names}"] * bool(names) + [
        n for n, a in one.tensors.items() if "state" not in n and not torch.allclose(a, other.tensors[n], atol=2e-5)
    ]


def compared(divide_by: DivideBy) -> tuple[list[str], list[float], list[float]]:
    """On each rank: what differs from weights that say the same, and the losses of the rank and of all ranks."""
    build = CountingScorer if divide_by == "count" else Scorer
    outcome, whole = run(nestpipe(3), build, divide_by)
    wrong = far(outcome, run(serial(3), Weighted, divide_by, overlap=False)[0])
    if divide_by == "count":
        listed = run(serial(3), build, divide_by, overlap=False)[0]
        wrong += differences(outcome, listed)
        if dist.is_initialized():
            for method in (NESTPIPE_TWO_D_SP, NESTPIPE_TWO_D_SP_EXACT):
                wrong += far(run(method.schedule(3), build, divide_by, groups=2)[0], listed)
    return wrong, outcome.losses, whole


DIVISORS = ("samples", "rank_samples", "ranks", "count")


@pytest.mark.parametrize("divide_by", DIVISORS)
def test_one_rank(divide_by: DivideBy) -> None:
    wrong, losses, whole = compared(divide_by)
    assert wrong == []
    assert whole == losses
    assert len(losses) == SETTING.steps and all(map(math.isfinite, losses))


@pytest.mark.parametrize("divide_by", DIVISORS[1:])
def test_two_ranks(pool2, divide_by: DivideBy) -> None:
    (wrong, losses, whole), (wrong_too, others, same) = pool2.run(compared, divide_by)
    assert wrong == wrong_too == []
    assert whole == same
    assert whole == pytest.approx([a + b for a, b in zip(losses, others, strict=True)], rel=1e-6)
    assert divide_by != "count" or whole[2] == 0.0


# ---- the schedule of a model that counts ----


METHODS = (*BUILT_IN.values(), NESTPIPE_TWO_D_SP, NESTPIPE_TWO_D_SP_EXACT, UNIEMB)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_can_count_and_its_verdict_stays(method: Method) -> None:
    plain = method.schedule(2)
    made = counted(plain)
    assert parse(to_text(made)) == made == counted(made)
    assert {p.kind for p in check(made)} == {p.kind for p in check(plain)}


def test_an_update_before_the_all_reduce_is_refused_in_a_line() -> None:
    ops = sorted(serial(2).ops, key=lambda o: o.ref.stage == "A")
    with pytest.raises(
        ValueError, match=r"schedule 'early' has U before A, but a loss that is Summed .*another method"
    ):
        counted(schedule("early", 2, [op(o.ref.relative()) for o in ops]))


def test_the_checker_finds_a_count_that_is_not_summed_or_of_another_batch() -> None:
    made = counted(nestpipe(2))
    cut = tuple(replace(o, after=tuple(r for r in o.after if (o.ref.stage, r.stage) != ("U", "A"))) for o in made.ops)
    assert any("loss_count" in p.text for p in check(replace(made, ops=cut)) if p.kind == "race")
    plain = [replace(o, after=(), lane="one") for o in counted(serial(1)).ops]
    early = sorted(plain, key=lambda o: o.ref.stage == "A")
    texts = [p.text for p in check(replace(made, ops=tuple(early), micro_batches=1))]
    assert any("U0 reads loss_count of batch 0, but the slot holds nothing yet" in text for text in texts)
    assert any("U2 reads loss_count of batch 2, but the slot holds what belongs to batch 0" in text for text in texts)
