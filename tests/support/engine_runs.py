"""Runs of trainers on small data whose neighbouring batches share most keys, so that a stale read shows.

``train`` runs any Trainer; ``differences`` compares two runs bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.tables import TableConfig
from nestpipe.engine.engine import Engine
from nestpipe.engine.lanes import OneAtATime
from nestpipe.engine.thread_lanes import ThreadLanes
from nestpipe.schedule.operations import Ref, Schedule
from nestpipe.schedule.order import with_derived_edges
from nestpipe.schedule.templates import nestpipe
from nestpipe.trainer import ModelSpec, SparseOptimizer, Trainer

DIM = 8
TABLES = (
    TableConfig("item", rows=41, dim=DIM, features=("seen", "wanted"), scale=0.5),
    TableConfig("user", rows=7, dim=DIM, features=("who",), scale=0.5),
)


class Scorer(nn.Module):
    """Sums each feature's rows per sample, two small layers, squared error: one loss per sample."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.hidden = nn.Linear(3 * DIM, 6)
            self.score = nn.Linear(6, 1)

    def forward(self, batch: Batch) -> Tensor:
        embedded = self.embeddings(batch.sparse)
        sums = []
        for feature in ("seen", "wanted", "who"):
            rows, lengths = embedded[feature].values(), embedded[feature].lengths()
            sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            sums.append(torch.zeros(len(lengths), DIM).index_add_(0, sample, rows))
        scores = self.score(torch.tanh(self.hidden(torch.cat(sums, dim=1)))).squeeze(1)
        return (scores - batch.extra["label"]).square()


class CountingScorer(Scorer):
    """The sum of the losses of samples with a positive label, and their number."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        counts = batch.extra["label"] > 0
        return (super().forward(batch) * counts).sum(), counts.sum()


SPEC = ModelSpec(TABLES, Scorer)
COUNTING = ModelSpec(TABLES, CountingScorer, divide_by="count")


def make_batch(generator: torch.Generator, samples: int, first_id: int = 0) -> Batch:
    """``samples`` samples; each feature holds 0 to 4 keys a sample, ``who`` one."""

    def keys(rows: int, counts: Tensor) -> Jagged:
        # Squaring skews the draw: a few keys are in every batch, some in only one.
        draws = torch.rand(int(counts.sum()), generator=generator).square()
        return Jagged((draws * rows).long(), counts)

    counts = [torch.randint(0, 5, (samples,), generator=generator) for _ in range(2)]
    sparse = {"seen": keys(41, counts[0]), "wanted": keys(41, counts[1]), "who": keys(7, torch.ones_like(counts[0]))}
    label = torch.randn(samples, generator=generator)
    return Batch(sparse, torch.arange(first_id, first_id + samples), {"label": label})


def make_batches(count: int, rank: int = 0, seed: int = 0, samples: int = 10, uneven: bool = False) -> list[Batch]:
    """``uneven``: batches of 0 to ``samples`` samples (often fewer than micro-batches), and rank r has 2r fewer."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    sizes = [samples] * count
    if uneven:
        sizes = [int(n) for n in torch.randint(0, samples + 1, (max(1, count - 2 * rank),), generator=generator)]
        sizes[1::5] = [0] * len(sizes[1::5])
    return [make_batch(generator, n) for n in sizes]


@dataclass(frozen=True)
class Setting:
    """Everything but the schedule that determines what is learned."""

    sparse: str = "rowwise_adagrad"
    dense: str = "adam"
    seed: int = 0
    steps: int = 20
    uneven: bool = False
    epochs: int = 1
    samples: int = 10

    @property
    def sparse_optimizer(self) -> SparseOptimizer:
        return SparseOptimizer(self.sparse, lr=0.1)

    def dense_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.dense == "adam":
            return torch.optim.Adam(parameters, lr=1e-2)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)

    def batches(self, rank: int, epoch: int = 0) -> list[Batch]:
        return make_batches(self.steps, rank, self.seed + 7 * epoch, self.samples, self.uneven)


@dataclass
class Outcome:
    """What a run left behind on one rank; ``tensors`` by name: tables, dense weights, optimizer state."""

    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def train(trainer: Trainer, batches: Iterator[Batch], steps: int | None, outcome: Outcome | None = None) -> Outcome:
    """Run ``steps`` steps, or to the end of the data; losses are added to ``outcome``."""
    outcome = outcome or Outcome()
    while steps is None or len(outcome.losses) < steps:
        try:
            result = trainer.progress(batches)
        except StopIteration:
            break
        outcome.losses.append(result.loss)
        outcome.samples.append(result.samples)
    return outcome


def add_weights(outcome: Outcome, trainer: Trainer, tables: Sequence[str] = ("item", "user")) -> Outcome:
    """Collective: clones of the whole tables, the dense weights and this rank's optimizer state."""
    outcome.tensors |= {f"table {name}": trainer.table(name).clone() for name in tables}
    outcome.tensors |= {f"dense {name}": value.clone() for name, value in trainer.dense_state().items()}
    state = trainer.state_dict()
    if "state" in state:
        outcome.tensors["row state"] = state["state"].clone()
    if "dense_optimizer" in state:
        for index, values in state["dense_optimizer"]["state"].items():
            outcome.tensors |= {f"dense state {index} {k}": torch.as_tensor(v).clone() for k, v in values.items()}
    return outcome


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Names of what is not equal bit for bit."""
    names = [f"loss {n}" for n, (a, b) in enumerate(zip(one.losses, other.losses, strict=False)) if a != b]
    if len(one.losses) != len(other.losses):
        names.append(f"{len(one.losses)} or {len(other.losses)} steps")
    if one.samples != other.samples:
        names.append("samples")
    if one.tensors.keys() != other.tensors.keys():
        names.append("names of tensors")
    return names + [n for n, a in one.tensors.items() if n in other.tensors and not torch.equal(a, other.tensors[n])]


def jitter(seed: int, longest: float = 1e-3) -> Callable[[Ref], float]:
    """Delays for lanes: two of three operations start at once, the others up to ``longest`` seconds late."""
    draw = random.Random(seed)
    return lambda ref: max(0.0, draw.uniform(-2 * longest, longest))


def run_engine(
    schedule: Schedule,
    setting: Setting,
    rank: int = 0,
    overlap: bool = True,
    jitter_seed: int | None = None,
    looks: bool = False,
) -> Outcome:
    """Train all epochs of ``setting`` by ``schedule``. ``looks``: read a table after every third step."""
    torch.set_num_threads(1)
    delay = None if jitter_seed is None else jitter(jitter_seed)
    lanes = partial(ThreadLanes, delay=delay) if overlap else OneAtATime
    engine = Engine(schedule, SPEC, setting.sparse_optimizer, setting.dense_optimizer, 3, lanes)
    try:
        outcome = Outcome()
        for epoch in range(setting.epochs):
            batches = iter(setting.batches(rank, epoch))
            while looks and not len(outcome.losses) % 3:
                seen = len(outcome.losses)
                train(engine, batches, seen + 3, outcome)
                outcome.tensors[f"table after {len(outcome.losses)}"] = engine.table("item").clone()
                if len(outcome.losses) < seen + 3:
                    break
            train(engine, batches, None, outcome)
        return add_weights(outcome, engine)
    finally:
        engine.close()


def without_synchronisation(micro_batches: int) -> Schedule:
    """NestPipe with S left out and the edges derived again: free of races, and stale."""
    full = nestpipe(micro_batches)
    ops = tuple(replace(o, after=()) for o in full.ops if o.ref.stage != "S")
    return with_derived_edges(replace(full, name="nestpipe without S", ops=ops))
