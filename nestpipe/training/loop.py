"""The training loop on a rank: every method in turn, round by round, with checkpoints between steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from nestpipe.clustering.clustering import clustered
from nestpipe.config import OptimizerConfig, RunConfig
from nestpipe.data.batch import Batch
from nestpipe.data.dataset import Dataset
from nestpipe.datasets.loader import load_dataset
from nestpipe.measurement.clock import clock_offset
from nestpipe.measurement.trace import Span
from nestpipe.methods import Method, methods_of
from nestpipe.models.next_item import build_model_spec
from nestpipe.models.ranking_quality import evaluate
from nestpipe.ranks.rank import send_to_launcher
from nestpipe.trainer import DenseOptimizer, SparseOptimizer, StepResult, Trainer
from nestpipe.training.checkpoint import Checkpoints
from nestpipe.training.manifest import method_folder, newest, require_resumable, require_unused

#: Called after each step, on every rank, with (method, steps done, total, the rank's loss). It must return the same
#: order on every rank; ``stop`` saves first, if there is a folder for checkpoints.
AfterStep = Callable[[str, int, int, float], Literal["go", "save", "stop"]]


class Interrupted(RuntimeError):
    """The run was stopped between two steps, on all ranks together; what could be saved has been saved."""


@dataclass(frozen=True)
class RankResult:
    """What one rank saw of one method. ``results`` include steps before a resumption; ``resumed``: the first after.

    ``notes``: what a record should say of the resumption.
    """

    results: list[StepResult]
    spans: list[Span]
    clock_offset: float
    evaluation: dict[str, float]
    resumed: int | None = None
    notes: tuple[str, ...] = ()


@dataclass
class Course:
    """A method in training on this rank. ``first``: step of the first result; the rest as in ``RankResult``."""

    method: Method
    trainer: Trainer
    source: Iterator[Batch]
    checkpoints: Checkpoints | None
    results: list[StepResult]
    first: int = 0
    resumed: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def done(self) -> int:
        """Steps of this method that are done."""
        return self.first + len(self.results)

    def save(self) -> None:
        """Save a checkpoint, if there is a folder for them. Collective."""
        if self.checkpoints is not None:
            self.checkpoints.save(self.trainer, self.results)


def train_on_rank(config: RunConfig, after_step: AfterStep | None = None) -> dict[str, RankResult]:
    """Runs on each rank: trains every method in turn, round by round. Collective.

    Raises Interrupted if told to stop, CheckpointError if a checkpoint cannot be saved or resumed.
    """
    dataset = load_dataset(config.data, config.model, config.seed)
    courses = [start(config, method, dataset) for method in methods_of(config)]
    rounds = steps_of_rounds(config, dataset)
    total, target = sum(rounds), 0
    tell = progress_teller()

    def between_steps(course: Course) -> None:
        name, done, loss = course.method.name, course.done, course.results[-1].loss
        tell((name, done, total, loss), last=done == total)
        order = after_step(name, done, total, loss) if after_step else "go"
        if order != "go" or (config.checkpoint_every and done % config.checkpoint_every == 0):
            course.save()
        if order == "stop":
            for other in courses:
                if other is not course:
                    other.save()
            for each in courses:
                each.trainer.close()
            raise Interrupted(f"stopped after step {done} of {total} of {name}")

    for steps in rounds:
        target += steps
        for course in courses:
            dist.barrier()
            train_until(course, target, between_steps)
    offset = clock_offset()
    ranks = {}
    for course in courses:
        quality = ranking_quality(config, course.trainer, dataset) if config.evaluate else {}
        spans = course.trainer.take_spans()
        ranks[course.method.name] = RankResult(course.results, spans, offset, quality, course.resumed, course.notes)
    for course in courses:
        course.trainer.close()
    return ranks


def start(config: RunConfig, method: Method, dataset: Dataset) -> Course:
    """``method`` before its next step: the first, or with ``resume`` the one after its newest checkpoint. Collective.

    Raises CheckpointError.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rule = config.optimizer
    sparse = SparseOptimizer(rule.sparse_optimizer, rule.sparse_lr, rule.sparse_eps)
    spec = build_model_spec(config.training, dataset)
    trainer = method.build(spec, sparse, dense_optimizer(rule), config.seed, config.micro_batches)
    course = Course(method, trainer, iter(()), None, [])
    if config.checkpoint:
        folder = method_folder(config.checkpoint, method.name)
        course.checkpoints = Checkpoints(folder, method.name, settings_that_decide(config, method, dataset))
        same_sample = partial(step_at_same_sample, dataset, ranks)
        if not config.resume:
            course.checkpoints.begin()
        elif loaded := course.checkpoints.load(trainer, same_sample, sum(steps_of_rounds(config, dataset))):
            course.results = loaded.results
            course.resumed = trainer.trained
            course.first = course.resumed - len(loaded.results)
            course.notes = (loaded.note,) if loaded.note else ()
    source = dataset.batches(rank, ranks, start_step=course.resumed or 0)
    micro_batches = method.micro_batches_of(config.micro_batches)
    course.source = clustered(source, spec.tables, micro_batches) if config.clustering else source
    return course


def train_until(course: Course, steps: int, after_step: Callable[[Course], None]) -> None:
    """Train until ``steps`` steps are done; ``after_step`` is called after each. Collective."""
    while course.done < steps:
        course.results.append(course.trainer.progress(course.source))
        after_step(course)


def dense_optimizer(config: OptimizerConfig) -> DenseOptimizer:
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    return lambda parameters: kinds[config.dense_optimizer](parameters, lr=config.dense_lr)


def progress_teller(every_s: float = 0.1) -> Callable[..., None]:
    """``tell(message, last=False)`` sends rank 0's message to the launcher, at most one per ``every_s`` unless last."""
    previous = 0.0

    def tell(message: Any, last: bool = False) -> None:
        nonlocal previous
        now = time.monotonic()
        if dist.get_rank() == 0 and (last or now - previous > every_s):
            previous = now
            send_to_launcher(message)

    return tell


def ranking_quality(config: RunConfig, trainer: Trainer, dataset: Dataset) -> dict[str, float]:
    """HR and NDCG on rank 0; empty on the other ranks. Collective."""
    table = trainer.table("item")
    if dist.get_rank():
        return {}
    model = build_model_spec(config.training, dataset).build(torch.nn.Identity())
    model.load_state_dict(dict(trainer.dense_state()), strict=True)
    return evaluate(model, table, dataset)


def steps_of_rounds(config: RunConfig, dataset: Dataset) -> list[int]:
    """Steps of each round, warm-up included."""
    return config.steps_of_rounds((config.epochs or 0) * dataset.steps_per_epoch(config.workers))


def settings_that_decide(config: RunConfig, method: Method, dataset: Dataset) -> dict[str, Any]:
    """What decides what is learned. A run that resumes must have the same settings and data, but it may be longer."""
    settings = {"seed": config.seed, **config.in_record(method.micro_batches_of(config.micro_batches))}
    undecisive = ("steps", "rounds", "epochs", "evaluate", "pace_dense")
    decisive = {name: value for name, value in settings.items() if name not in undecisive}
    return {**decisive, "data_fingerprint": dataset.fingerprint}


def step_at_same_sample(dataset: Dataset, ranks: int, step: int, ranks_then: int) -> int | None:
    """The step of ``ranks`` ranks that starts at the sample where ``step`` of ``ranks_then`` ranks starts, or None."""
    epoch, within = divmod(step, dataset.steps_per_epoch(ranks_then))
    if within * ranks_then % ranks:
        return None
    return epoch * dataset.steps_per_epoch(ranks) + within * ranks_then // ranks


def check_resumable(config: RunConfig, methods: Sequence[Method], dataset: Dataset) -> None:
    """Raises CheckpointError, before any rank starts, if a method's newest checkpoint cannot be resumed, or if a run
    that does not resume finds checkpoints."""
    for method in methods if config.checkpoint else ():
        folder = method_folder(config.checkpoint or "", method.name)
        if not config.resume:
            require_unused(folder)
        elif (manifest := newest(folder)) is not None:
            manifest.require(settings_that_decide(config, method, dataset))
            same_sample = partial(step_at_same_sample, dataset, config.workers)
            steps = sum(steps_of_rounds(config, dataset))
            require_resumable(manifest, config.workers, same_sample, method.reshards, steps)
