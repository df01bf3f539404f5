"""Convergence of methods over the same data and seeds: curves of loss and ranking quality (the paper's Fig. 6, RQ2).

Each method can be paired with ``METHOD~ulp``: the same method with one dense weight moved by one unit in the last place
before the first step. The drift of that run from its twin shows what rounding by itself does to training. A method that
computes the same updates in another order should drift no further. A method that reads stale rows drifts further.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nestpipe.config import ConfigError, DataConfig, ModelConfig, OptimizerConfig, RunConfig, names_in
from nestpipe.datasets.loader import load_dataset
from nestpipe.machine.files import slug, write_atomically
from nestpipe.machine.json_files import json_text, numbers, read_json
from nestpipe.measurement.provenance import provenance
from nestpipe.measurement.record import diverged
from nestpipe.methods import methods_of
from nestpipe.ranks.pool import RankPool
from nestpipe.trainer import Trainer
from nestpipe.training.loop import Course, progress_teller, ranking_quality, start, train_until

ULP = "~ulp"
MAX_SEEDS = 1000
DAY_S = 24 * 3600.0
_SCHEMA = "nestpipe-convergence-1"


@dataclass(frozen=True)
class ConvergenceConfig:
    """Train methods over the same data with several seeds, and write their loss and HR/NDCG curves for Fig. 6.
    Finished runs are kept, so you can interrupt it and start it again as often as you like."""

    methods: str = "torchrec,torchrec~ulp,2d-sp,uniemb,nestpipe,serial(8)"
    """Comma-separated methods; METHOD~ulp moves one weight by one unit in the last place before it starts."""
    seeds: int = 3
    """Runs per method: seeds 1, 2 and so on."""
    workers: int = 2
    """Rank processes."""
    steps: int = 1500
    """Steps per run."""
    evaluations: int = 5
    """Evaluations per run, evenly spread; the last one follows the last step."""
    micro_batches: int = 8
    """Micro-batches per batch, for methods with a frozen window."""
    replica_groups: int = 2
    """Groups of ranks, each with a whole copy of the tables, for 2d-sp."""
    data: DataConfig = field(
        default_factory=lambda: DataConfig(data_scale=0.002, users=28_000, batch_size=128, negatives=32)
    )
    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(embedding_dim=32, dense_layers=1, heads=1, width=32, sequence_length=20)
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        if not self.method_names or min(self.seeds, self.steps, self.evaluations) < 1:
            raise ConfigError("--seeds, --steps and --evaluations must be at least 1, and --methods must name a method")
        if self.evaluations > self.steps:
            raise ConfigError(
                f"--evaluations {self.evaluations} is more than --steps {self.steps}; it must be at most that"
            )
        if self.seeds > MAX_SEEDS:
            raise ConfigError(f"--seeds {self.seeds} is too many; it must be at most {MAX_SEEDS}")

    @property
    def method_names(self) -> list[str]:
        return names_in(self.methods)


@dataclass(frozen=True)
class Curve:
    """One method's run with one seed. ``losses``: global loss of every step. ``quality``: by metric, the values after
    each number of steps in ``evaluated``."""

    method: str
    seed: int
    config: Mapping[str, Any]
    losses: Sequence[float]
    evaluated: Sequence[int]
    quality: Mapping[str, Sequence[float]]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def diverged(self) -> str:
        """A sentence if a step's loss was not a finite number, else ""."""
        return diverged(f"{self.method}, seed {self.seed}", self.losses)

    @property
    def setting(self) -> str:
        """12 hex digits: curves of one setting belong in one figure."""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:12]


#: (what runs, steps done, total steps)
Progress = Callable[[str, int, int], None]


def run_config(config: ConvergenceConfig, method: str, seed: int) -> RunConfig:
    return RunConfig(
        methods=method.removesuffix(ULP),
        workers=config.workers,
        steps=config.steps,
        rounds=1,
        micro_batches=config.micro_batches,
        replica_groups=config.replica_groups,
        seed=seed,
        data=config.data,
        model=config.model,
        optimizer=config.optimizer,
    )


def curve_config(config: ConvergenceConfig) -> dict[str, Any]:
    """The settings that decide a curve, except method and seed."""
    whole = dataclasses.asdict(config)
    return json.loads(json.dumps({name: value for name, value in whole.items() if name not in ("methods", "seeds")}))


def converge(config: ConvergenceConfig, folder: Path, progress: Progress | None = None) -> list[Curve]:
    """Run every method with every seed, except those already in ``folder``. Returns all curves, also those found there.
    Raises as ``training.runs`` does."""
    for name in config.method_names:
        methods_of(run_config(config, name, 1))
    runs = [(name, seed) for seed in range(1, config.seeds + 1) for name in config.method_names]
    found = {(c.method, c.seed): c for c in read_curves(folder) if c.config == curve_config(config)}
    load_dataset(config.data, config.model, 1)  # first here, so that an error in the data is reported once
    curves = []
    with ExitStack() as stack:
        pool: RankPool | None = None
        for number, (name, seed) in enumerate(runs):
            curve = found.get((name, seed))
            if curve is None:
                before, total = number * config.steps, len(runs) * config.steps
                show = partial(_show, progress, f"{name}, seed {seed}", before, total)
                pool = pool or stack.enter_context(RankPool(config.workers))  # only if there is something to run
                job = (curve_on_rank, config, name, seed)
                losses, evaluated, quality = pool.run(*job, on_message=show, timeout_s=DAY_S)[0]
                curve = Curve(name, seed, curve_config(config), losses, evaluated, quality, provenance())
                write_curve(folder, curve)
            curves.append(curve)
    return curves


def _show(progress: Progress | None, title: str, before: int, total: int, rank: int, done: int) -> None:
    if progress:
        progress(title, before + done, total)


def curve_on_rank(
    config: ConvergenceConfig, name: str, seed: int
) -> tuple[list[float], list[int], dict[str, list[float]]]:
    """Runs on each rank. Returns global losses, evaluated steps, metrics (rank 0; empty on the others). Collective."""
    run = run_config(config, name, seed)
    (method,) = methods_of(run)
    dataset = load_dataset(run.data, run.model, seed)
    course = start(run, method, dataset)
    if name.endswith(ULP):
        nudge(course.trainer)
    marks = {round(config.steps * n / config.evaluations) for n in range(1, config.evaluations + 1)}
    quality: dict[str, list[float]] = {}
    tell = progress_teller()

    def evaluate_at_marks(course: Course) -> None:
        if course.done in marks:
            for metric, value in ranking_quality(run, course.trainer, dataset).items():
                quality.setdefault(metric, []).append(value)
        tell(course.done)

    train_until(course, config.steps, evaluate_at_marks)
    course.trainer.close()
    losses = torch.tensor([result.loss for result in course.results], dtype=torch.float64)
    dist.all_reduce(losses)
    return losses.tolist(), sorted(marks), quality


def nudge(trainer: Trainer) -> None:
    """Move the largest dense weight by one unit in the last place, the same way on every rank."""
    weight = max(trainer.dense_state().values(), key=lambda w: float(w.abs().max())).view(-1)
    at = weight.abs().argmax()
    weight[at] = torch.nextafter(weight[at], torch.tensor(torch.inf))


def write_curve(folder: Path, curve: Curve) -> Path:
    path = folder / f"{slug(curve.method)}-seed{curve.seed}-{curve.setting}.json"
    write_atomically(path, json_text({"schema": _SCHEMA, **dataclasses.asdict(curve)}, default=list) + "\n")
    return path


def _curve(data: Mapping[str, Any]) -> Curve:
    """Raises KeyError, TypeError or ValueError. Null is a number that was not finite."""
    quality = {metric: numbers(values) for metric, values in data["quality"].items()}
    if {len(values) for values in quality.values()} != {len(data["evaluated"])}:
        raise ValueError("a curve has a value for each evaluation")
    return Curve(**{**data, "losses": numbers(data["losses"]), "quality": quality})


def read_curves(folder: Path) -> list[Curve]:
    """All curves of the folder, in order of file name; other files are ignored."""
    curves = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = read_json(path)
            if data.pop("schema") == _SCHEMA:
                curves.append(_curve(data))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return curves
