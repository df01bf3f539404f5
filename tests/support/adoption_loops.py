"""A small model under NestPipeline, and batches that are told apart by their size, for tests of loops."""

from __future__ import annotations

import torch

from nestpipe.adoption.pipeline import NestPipeline
from tests.support.adoption_cases import RULE, Clicks, Scores, clicks, sgd


def pipeline_of(model=None, **options) -> NestPipeline:
    if model is None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = Scores()
    return NestPipeline(model, sgd, RULE, **{"micro_batches": 3, **options})


def sized(*sizes: int) -> list[Clicks]:
    """Batches that are told apart by their number of samples."""
    return [next(clicks(samples=n, steps=1)()) for n in sizes]


def to_the_end(pipeline, batches, most=99) -> list[int]:
    """This rank's samples of each step."""
    found = []
    for _ in range(most):
        try:
            found.append(pipeline.progress(batches).samples)
        except StopIteration:
            break
    return found
