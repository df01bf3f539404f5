"""The training loop on a rank: every method in turn, round by round, with checkpoints between steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from nestpipe.clustering.clustering import clustered
from nestpipe.config import OptimizerConfig
from nestpipe.data.batch import Batch
from nestpipe.data.dataset import Dataset
from nestpipe.datasets.loader import load_dataset
from nestpipe.measurement.clock import clock_offset
from nestpipe.measurement.trace import Span
from nestpipe.methods import Method
from nestpipe.models.next_item import build_model_spec
from nestpipe.models.ranking_quality import evaluate
from nestpipe.ranks.rank import send_to_launcher
from nestpipe.trainer import DenseOptimizer, SparseOptimizer, StepResult, Trainer
from nestpipe.training.checkpoint import Checkpoints, Manifest, method_folder, newest, refuse_other_ranks

if TYPE_CHECKING:
    from nestpipe.training.runs import RunConfig

#: Steps at the start of a round that are not reported: a paused pipeline has prefetched for free.
WARM_UP_STEPS = 4

#: After a step, on every rank: (method, steps done, of, the rank's loss) -> what to do now, on all ranks alike.
#: ``stop`` saves first, where there is a place to.
AfterStep = Callable[[str, int, int, float], Literal["go", "save", "stop"]]


class Interrupted(RuntimeError):
    """The run was stopped between two steps, on all ranks together; what could be saved is saved."""


@dataclass(frozen=True)
class RankResult:
    """What one rank saw of one method. ``results``: of steps before a resumption too; ``resumed``: the first after."""

    results: list[StepResult]
    spans: list[Span]
    clock_offset: float
    evaluation: dict[str, float]
    resumed: int | None = None


@dataclass
class _Course:
    """A method under way on this rank."""

    method: Method
    trainer: Trainer
    source: Iterator[Batch]
    checkpoints: Checkpoints | None
    results: list[StepResult]
    first: int = 0
    resumed: int | None = None

    @property
    def done(self) -> int:
        return self.first + len(self.results)


def rounds_of(config: RunConfig, steps: int) -> list[int]:
    """Steps of each round, warm-up included; epochs are one round, ``steps`` long."""
    if config.epochs is not None:
        return [steps]
    share, larger = divmod(config.steps, config.rounds)
    return [WARM_UP_STEPS + share + (r < larger) for r in range(config.rounds)]


def dense_optimizer(config: OptimizerConfig) -> DenseOptimizer:
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    return lambda parameters: kinds[config.dense_optimizer](parameters, lr=config.dense_lr)


def identity(config: RunConfig, micro_batches: int) -> dict[str, Any]:
    """The configuration as far as it decides what a method does; what stands elsewhere in a record is left out."""
    elsewhere = ("methods", "workers", "seed", "testbed", "timeout", "checkpoint", "checkpoint_every", "resume")
    whole = {**dataclasses.asdict(config), "micro_batches": micro_batches}
    return {name: value for name, value in whole.items() if name not in elsewhere}


def _learned(config: RunConfig, method: Method) -> dict[str, Any]:
    """What decides what is learned: a checkpoint goes on under the same alone. Longer runs are welcome."""
    decisive = identity(config, method.micro_batches or config.micro_batches)
    for name in ("steps", "rounds", "epochs", "evaluate", "pace_dense"):
        decisive.pop(name, None)
    return {"seed": config.seed, **decisive}


def step_here(dataset: Dataset, ranks: int, step: int, ranks_then: int) -> int | None:
    """The step of ``ranks`` ranks that begins at the sample where ``step`` of another number began; None: none does."""
    epoch, within = divmod(step, dataset.steps_per_epoch(ranks_then))
    if within * ranks_then % ranks:
        return None
    return epoch * dataset.steps_per_epoch(ranks) + within * ranks_then // ranks


def check_resumable(config: RunConfig, dataset: Dataset) -> None:
    """Before any rank starts: raises CheckpointError where a method's newest checkpoint cannot be gone on from."""
    for method in config.chosen if config.resume and config.checkpoint else ():
        manifest: Manifest | None = newest(method_folder(config.checkpoint or "", method.name))
        if manifest is None:
            continue
        manifest.require(_learned(config, method))
        if manifest.ranks != config.workers:
            here = partial(step_here, dataset, config.workers)
            refuse_other_ranks(manifest, config.workers, here, not method.observed)


def train_on_rank(config: RunConfig, after_step: AfterStep | None = None) -> dict[str, RankResult]:
    """Run on each rank: every method in turn, round by round. Collective.

    Raises Interrupted where told to stop, CheckpointError where nothing can be saved or gone on from.
    """
    dataset = load_dataset(config.data, config.model, config.seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    courses = [_begin(config, method, dataset) for method in config.chosen]
    rounds = rounds_of(config, (config.epochs or 0) * dataset.steps_per_epoch(world_size))
    total, target, told = sum(rounds), 0, 0.0
    for steps in rounds:
        target += steps
        for course in courses:
            dist.barrier()
            while course.done < target:
                result = course.trainer.progress(course.source)
                course.results.append(result)
                name, done = course.method.name, course.done
                if rank == 0 and (time.monotonic() - told > 0.1 or done == total):
                    told = time.monotonic()
                    send_to_launcher((name, done, total, result.loss))
                order = after_step(name, done, total, result.loss) if after_step else "go"
                if order != "go" or (config.checkpoint_every and done % config.checkpoint_every == 0):
                    _save(course)
                if order == "stop":
                    for other in courses:
                        if other is not course:
                            _save(other)
                    for each in courses:
                        each.trainer.close()
                    raise Interrupted(f"stopped after step {done} of {total} of {name}")
    offset = clock_offset()
    ranks = {}
    for course in courses:
        quality = _quality(config, course.trainer, dataset) if config.evaluate else {}
        spans = course.trainer.take_spans()
        ranks[course.method.name] = RankResult(course.results, spans, offset, quality, course.resumed)
    for course in courses:
        course.trainer.close()
    return ranks


def _begin(config: RunConfig, method: Method, dataset: Dataset) -> _Course:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rule = config.optimizer
    sparse = SparseOptimizer(rule.sparse_optimizer, rule.sparse_lr, rule.sparse_eps)
    spec = build_model_spec(config.training, dataset)
    micro_batches = method.micro_batches or config.micro_batches
    trainer = method.build(spec, sparse, dense_optimizer(rule), config.seed, micro_batches)
    course = _Course(method, trainer, iter(()), None, [])
    if config.checkpoint:
        folder = method_folder(config.checkpoint, method.name)
        course.checkpoints = Checkpoints(folder, method.name, _learned(config, method))
        here = partial(step_here, dataset, world_size)
        results = course.checkpoints.load(trainer, here) if config.resume else None
        if results is not None:
            course.results = results
            course.resumed = trainer.trained
            course.first = course.resumed - len(results)
    source = dataset.batches(rank, world_size, start_step=course.resumed or 0)
    course.source = clustered(source, spec.tables, micro_batches) if config.clustering else source
    return course


def _save(course: _Course) -> None:
    if course.checkpoints is not None:
        course.checkpoints.save(course.trainer, course.results)


def _quality(config: RunConfig, trainer: Trainer, dataset: Dataset) -> dict[str, float]:
    """HR and NDCG on rank 0, empty elsewhere. Collective."""
    table = trainer.table("item")
    if dist.get_rank():
        return {}
    model = build_model_spec(config.training, dataset).build(torch.nn.Identity())
    model.load_state_dict(dict(trainer.dense_state()), strict=True)
    return evaluate(model, table, dataset)
