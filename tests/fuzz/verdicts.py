"""Runs a case under NestPipeline and compares it with the plain loop."""

from __future__ import annotations

import contextlib
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
from tests.fuzz.programs import OWN_TYPES, batches, prepared
from tests.fuzz.reference import ADAGRAD_EPS, LR, Trained, dense_optimizer, plain, started

#: A sentence that a refusal may have. Anything else that is raised counts as a crash.
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
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = started(case, rank)
    try:
        pipeline = NestPipeline(
            model,
            dense_optimizer(case),
            SparseOptimizer(case.sparse, LR, ADAGRAD_EPS),
            micro_batches=case.micro_batches,
            method=case.method,
            reduction=case.reduction,
            clustering=case.clustering,
            average=case.average,
            preprocess=prepared if case.preprocess else None,
            shared=("shared",) if "shared" in case.extras else (),
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


def _refusal(error: BaseException) -> str:
    """The sentence of ``error``, if it is NestPipe's own and one line. Raises ``error`` otherwise."""
    frames = traceback.extract_tb(error.__traceback__)
    if "nestpipe" not in frames[-1].filename or len(str(error).splitlines()) != 1:
        raise error
    return str(error)


def _trained(case: Case, pipeline: NestPipeline, model: Any, rank: int, losses: list[float]) -> Trained:
    scores: Tensor | None = None

    def step(source: Iterator[Any]) -> None:
        nonlocal scores
        if "eval" in case.habits and len(losses) == 1:
            model.eval()  # and forgotten: a plain loop would still train, so this must be refused
        result = pipeline.progress(source)
        losses.append(result.global_loss if result.global_loss is not None else float("nan"))
        scores = pipeline.output if result.samples else None
        if "zero_grad" in case.habits and pipeline.optimizer is not None:
            pipeline.optimizer.zero_grad()
        if "model.zero_grad" in case.habits:
            model.zero_grad(set_to_none=case.seed % 2 == 0)
        if "export" in case.habits and len(losses) == 2:
            pipeline.export()

    last = None
    for number, sizes in enumerate(case.passes):
        source = last = batches(case, number, rank)
        if number == 0 and case.cut:
            for _ in range(case.cut):
                step(source)
        elif case.loop == "count":
            for _ in range(len(sizes[rank])):
                step(source)
        else:
            with contextlib.suppress(StopIteration):
                while True:
                    step(source)
    with contextlib.suppress(StopIteration):  # what was in flight when a pass was left, or had not been called for
        while last is not None and (case.loop == "count" or case.cut):
            step(last)
    exported = pipeline.export()
    return Trained(losses, {name: p.detach().clone() for name, p in exported.named_parameters()}, scores)


def verdict_of(case: Case, found: Trained | str) -> Verdict:
    """``found``: what ``try_case`` returned on rank 0."""
    if isinstance(found, str):
        return Verdict("refused", found)
    if "eval" in case.habits and len(found.losses) > 1:
        return Verdict("DIFFERENT", "it trains in eval mode")
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
    if wanted.weights.keys() != found.weights.keys():
        return Verdict("DIFFERENT", f"weights {sorted(wanted.weights.keys() ^ found.weights.keys())}")
    start = dict(started(case, 0).named_parameters())
    for name, one in wanted.weights.items():
        gap = float((one.float() - found.weights[name].float()).abs().max())
        moved = float((one.float() - start[name].detach().float()).abs().max())
        size = float(one.float().abs().max())
        if not gap <= 10 * rough * moved + 2e-6 * max(size, 1.0) + (2e-2 * size if case.precision == "bfloat16" else 0):
            return Verdict("DIFFERENT", f"{name} is apart by {gap:.3g}, having moved by {moved:.3g}")
    one, other = wanted.scores, found.scores
    if one is not None and (other is None or not _close(one, other, 5 * rough)):
        return Verdict("DIFFERENT", "the scores of the last step are others, or in another order")
    return Verdict("equal")


def _close(one: Tensor, other: Tensor, rough: float) -> bool:
    return one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=rough, atol=rough)
