"""Runs a case under NestPipeline and compares it with the plain loop."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.adoption import NestPipeline
from nestpipe.methods import find_method
from nestpipe.trainer import SparseOptimizer
from tests.fuzz.cases import Case
from tests.fuzz.data import OWN_TYPES, Again, batches, field, prepared, shared_fields
from tests.fuzz.reference import (
    ADAGRAD_EPS,
    LR,
    Trained,
    after_step,
    dense_optimizer,
    pieces,
    plain,
    scheduler_of,
    started,
    tables,
)

#: What a refusal may be. Anything else that is raised counts as a crash.
_REFUSALS = (ValueError, RuntimeError)


@dataclass(frozen=True)
class Verdict:
    """``kind``: equal, refused, DIFFERENT, CRASH or skipped (the plain loop cannot run it either)."""

    kind: str
    why: str = ""


class RefusedLater(str):
    """A refusal after the first step, which other ranks need not have met."""


def reads_ahead(case: Case) -> int:
    return find_method(case.method).schedule(case.micro_batches).places["P"].offset


def try_case(case: Case) -> Trained | str:
    """On a rank: what was trained, or the sentence that refused it. Raises whatever else is raised."""
    found = _tried_once(case)
    if case.repeat and isinstance(found, Trained):
        second = _tried_once(case)
        assert isinstance(second, Trained)
        found.again = second.losses
    return found


def _tried_once(case: Case) -> Trained | str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = started(case, rank)
    try:
        pipeline = NestPipeline(
            model,
            dense_optimizer(case),
            _sparse_optimizer(case, model),
            micro_batches=case.micro_batches,
            method=case.method,
            reduction=case.reduction,
            clustering=case.clustering,
            average=case.average,
            preprocess=prepared if case.preprocess else None,
            shared=shared_fields(case),
            own_types=OWN_TYPES,
        )
    except _REFUSALS as error:
        return _refusal(error)
    losses: list[float] = []
    try:
        found = _trained(case, pipeline, model, rank, losses)
    except _REFUSALS as error:
        with contextlib.suppress(Exception):
            pipeline.close()
        return RefusedLater(_refusal(error)) if losses else _refusal(error)
    pipeline.close()
    return found


def _sparse_optimizer(case: Case, model: Any) -> SparseOptimizer | None:
    rows = [p for p in tables(model).values() if p.requires_grad]
    if not case.stated or not rows:
        return SparseOptimizer(case.sparse, LR, ADAGRAD_EPS)
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
    from torchrec.optim import RowWiseAdagrad

    if case.sparse == "sgd":
        apply_optimizer_in_backward(torch.optim.SGD, rows, {"lr": LR})
    else:
        apply_optimizer_in_backward(RowWiseAdagrad, rows, {"lr": LR, "eps": ADAGRAD_EPS})
    return None


def _refusal(error: BaseException) -> str:
    """The sentence of ``error``, if it is NestPipe's own and one line. Raises ``error`` otherwise."""
    frames = traceback.extract_tb(error.__traceback__)
    if "nestpipe" not in frames[-1].filename or len(str(error).splitlines()) != 1:
        raise error
    return str(error)


def _trained(case: Case, pipeline: NestPipeline, model: Any, rank: int, losses: list[float]) -> Trained:
    outputs: list[Tensor] = []
    scheduler = scheduler_of(case, pipeline.optimizer)
    reuse = "reuse" in case.habits

    def step(source: Iterator[Any]) -> None:
        nonlocal outputs
        if "eval" in case.habits and len(losses) == 1:
            model.eval()  # and forgotten: a plain loop would still train, so this must be refused
        result = pipeline.progress(source)
        losses.append(result.global_loss if result.global_loss is not None else float("nan"))
        outputs = pieces(pipeline.output) if result.samples else []
        after_step(case, len(losses) - 1, model, scheduler)
        _look_around(case, pipeline, model, len(losses))

    def until_end(source: Iterator[Any]) -> None:
        with contextlib.suppress(StopIteration):
            while True:
                step(source)

    every = Again([batches(case, number, rank, reuse) for number in range(len(case.passes))])
    for number, sizes in enumerate(case.passes):
        source = every if case.loop == "again" else batches(case, number, rank, reuse)
        is_last = number == len(case.passes) - 1
        count = case.stop if is_last and case.stop else case.cut if number == 0 and case.cut else 0
        if count or case.loop == "count":
            for _ in range(count or len(sizes[rank])):
                step(source)
        if (case.loop != "count" and not count) or (is_last and not case.stop):
            until_end(source)
    return _at_the_end(case, pipeline, losses, outputs)


def _look_around(case: Case, pipeline: NestPipeline, model: Any, steps: int) -> None:
    """What users do between steps, and what must not change how the model is trained."""
    if "zero_grad" in case.habits and pipeline.optimizer is not None:
        pipeline.optimizer.zero_grad()
    if "model.zero_grad" in case.habits:
        model.zero_grad(set_to_none=case.seed % 2 == 0)
    if "export" in case.habits and steps == 2:
        pipeline.export()
    if "deepcopy" in case.habits and steps == 1:
        copy.deepcopy(model)
    if "evaluate" in case.habits and steps == 1:
        twin = pipeline.export().eval()
        batch = next((b for b in batches(case, 0, 0) if len(field(b, "label"))), None)
        if batch is not None and not case.repeat:
            with torch.no_grad():
                twin(prepared(batch) if case.preprocess else batch)
        model.eval()
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm1d):
                module.eval()


def _at_the_end(case: Case, pipeline: NestPipeline, losses: list[float], outputs: list[Tensor]) -> Trained:
    last = pipeline.detach() if "detach" in case.habits else pipeline.export()
    weights = {name: p.detach().clone() for name, p in last.named_parameters()}
    buffers = {name: value.clone() for name, value in last.named_buffers()}
    return Trained(losses, weights, outputs, buffers)


def verdict_of(case: Case, found: Trained | str) -> Verdict:
    """``found``: what ``try_case`` returned on rank 0."""
    if isinstance(found, str):
        return Verdict("refused", found)
    if "eval" in case.habits and len(found.losses) > 1:
        return Verdict("DIFFERENT", "it trains in eval mode")
    if case.repeat:
        same = torch.equal(torch.tensor(found.losses), torch.tensor(found.again))
        return Verdict("equal") if same else Verdict("DIFFERENT", "two runs from one seed differ")
    try:
        wanted = plain(case, reads_ahead(case))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return Verdict("skipped", f"the plain loop fails: {type(error).__name__}: {str(error).splitlines()[0]}")
    return _compared(case, wanted, found)


def _compared(case: Case, wanted: Trained, found: Trained) -> Verdict:
    if len(wanted.losses) != len(found.losses):
        return Verdict("DIFFERENT", f"{len(found.losses)} steps, wanted {len(wanted.losses)}")
    if not all(torch.isfinite(torch.tensor(wanted.losses))):
        return Verdict("skipped", "the plain loop diverges")
    rough = 3e-2 if case.precision == "bfloat16" else 2e-4
    for step, (one, other) in enumerate(zip(wanted.losses, found.losses, strict=True)):
        if not abs(one - other) <= rough * max(abs(one), 1e-2):
            return Verdict("DIFFERENT", f"loss of step {step} is {other:.6g}, wanted {one:.6g}")
    for what, one, other in (
        ("weights", wanted.weights, found.weights),
        ("buffers", wanted.buffers, found.buffers),
    ):
        if one.keys() != other.keys():
            return Verdict("DIFFERENT", f"{what} {sorted(one.keys() ^ other.keys())}")
    model = started(case, 0)
    start = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    others = {**found.weights, **found.buffers}
    for name, one in {**wanted.weights, **wanted.buffers}.items():
        gap = float((one.float() - others[name].float()).abs().max())
        moved = float((one.float() - start[name].detach().float()).abs().max())
        size = float(one.float().abs().max())
        if not gap <= 10 * rough * moved + 2e-6 * max(size, 1.0) + (2e-2 * size if case.precision == "bfloat16" else 0):
            return Verdict("DIFFERENT", f"{name} is apart by {gap:.3g}, having moved by {moved:.3g}")
    if len(wanted.outputs) != len(found.outputs) or not all(
        _close(one, other, 5 * rough) for one, other in zip(wanted.outputs, found.outputs, strict=True)
    ):
        return Verdict("DIFFERENT", "the outputs of the last step are others, or in another order")
    return Verdict("equal")


def _close(one: Tensor, other: Tensor, rough: float) -> bool:
    return one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=rough, atol=rough)
