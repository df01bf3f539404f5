"""Any method by name on the same small model, data and seed: what the tests of methods compare."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from baselines import registry
from nestpipe.data.batch import Batch
from nestpipe.measurement.trace import Span
from nestpipe.methods import BUILT_IN, Method, MethodOptions, find_method
from nestpipe.trainer import ModelSpec, SparseOptimizer, Trainer
from tests.support.engine_runs import Outcome
from tests.support.torchrec_model import SEED, TABLES, Model, adam, make_batch, sgd

SPEC = ModelSpec(TABLES, Model)
DENSE = {"sgd": sgd, "adam": adam}
METHODS = {**BUILT_IN, **{m.name: m for m in vars(registry).values() if isinstance(m, Method)}}
#: What the checker must say without --check's help: a kind of problem, None for synchronous training.
VERDICTS = {
    "serial": None,
    "nestpipe": None,
    "dbp-only": None,
    "fwp-only": None,
    "torchrec": None,
    "torchrec-planner": None,
    "torchrec-dedup": None,
    "torchrec-bf16": "lossy",
    "2d-sp": "update_rule",
    "uniemb": "stale",
    "nestpipe+bf16": "lossy",
    "nestpipe+2d-sp": "update_rule",
    "nestpipe+2d-sp-exact": None,
}
RULES = {
    "sgd": SparseOptimizer("sgd", lr=0.5),
    "rowwise_adagrad": SparseOptimizer("rowwise_adagrad", lr=0.05, eps=1e-4),
    "adam": SparseOptimizer("adam", lr=0.01, eps=1e-4),
}


@dataclass(frozen=True)
class Run:
    """``method``: a name; ``rule``: of RULES; ``groups`` and ``interval`` as in MethodOptions."""

    method: str
    rule: str = "rowwise_adagrad"
    groups: int = 2
    interval: int = 1
    micro_batches: int = 3
    dense: str = "sgd"

    @property
    def found(self) -> Method:
        plain = self.method.partition("(")[0]
        method = find_method(self.method) if plain in BUILT_IN else METHODS[self.method]
        return method.with_options(MethodOptions(self.groups, self.interval, self.rule))

    @property
    def template(self):
        return self.found.schedule(self.micro_batches)

    def trainer(self) -> Trainer:
        torch.set_num_threads(1)
        return self.found.build(SPEC, RULES[self.rule], DENSE[self.dense], SEED, self.micro_batches)


def batches(steps: int, samples: int = 6, known: bool = True) -> list[Batch]:
    """This rank's batches; a rank's number of samples differs from its neighbour's."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    sizes = [samples - r % 2 for r in range(world)]
    return [make_batch(step, rank, sizes[rank], sum(sizes) if known else None) for step in range(steps)]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Collective: the whole tables and the dense weights."""
    tables = {f"table {t.name}": trainer.table(t.name).clone() for t in TABLES}
    return tables | {f"dense {n}": v.clone() for n, v in trainer.dense_state().items()}


def train_methods(runs: list[Run], steps: int = 8) -> list[tuple[Outcome, list[Span]]]:
    """On a rank, one after the other."""
    return [train_method(run, steps) for run in runs]


def train_method(run: Run, steps: int = 8) -> tuple[Outcome, list[Span]]:
    trainer = run.trainer()
    try:
        outcome, iterator = Outcome(), iter(batches(steps))
        while True:
            try:
                result = trainer.progress(iterator)
            except StopIteration:
                break
            outcome.losses.append(result.loss)
            outcome.samples.append(result.samples)
        outcome.tensors = weights(trainer)
        return outcome, trainer.take_spans()
    finally:
        trainer.close()


def largest_difference(one: Outcome, other: Outcome) -> float:
    return max(float((one.tensors[name] - other.tensors[name]).abs().max()) for name in other.tensors)


def largest_update(outcome: Outcome) -> float:
    """The largest change of a weight of the tables: the scale of differences."""
    from nestpipe.embedding.host_table import initial_rows

    start = {f"table {t.name}": initial_rows(SEED, t, 0, t.rows) for t in TABLES}
    return max(float((outcome.tensors[name] - value).abs().max()) for name, value in start.items())
