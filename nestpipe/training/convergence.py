"""Convergence of methods over the same data and seeds: curves of loss and ranking quality (the paper's Fig. 6, RQ2).

Beside a method stands ``METHOD~ulp``: the same method with one dense weight moved by one unit in the last place
before the first step. How far that run drifts from its twin is what rounding alone does to training; a method that
computes the same updates in another order should drift no further, one that reads stale rows does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nestpipe.config import DataConfig, ModelConfig, OptimizerConfig
from nestpipe.datasets.loader import load_dataset
from nestpipe.machine.files import write_atomically
from nestpipe.measurement.provenance import provenance
from nestpipe.models.next_item import build_model_spec
from nestpipe.models.ranking_quality import evaluate
from nestpipe.ranks.pool import RankPool
from nestpipe.ranks.rank import send_to_launcher
from nestpipe.trainer import SparseOptimizer, Trainer
from nestpipe.training.runs import ConfigError, RunConfig, dense_optimizer, validate

ULP = "~ulp"
MOST_SEEDS = 1000
_SCHEMA = "nestpipe-convergence-1"


@dataclass(frozen=True)
class ConvergenceConfig:
    """Train methods over the same data with several seeds, and write their loss and HR/NDCG curves for Fig. 6.
    Finished runs are kept: interrupt it and start it again as often as you like."""

    methods: str = "torchrec,torchrec~ulp,2d-sp,uniemb,nestpipe,serial(8)"
    """Comma-separated methods; METHOD~ulp moves one weight by one unit in the last place before it starts."""
    seeds: int = 3
    """Runs per method: seeds 1, 2 and so on."""
    workers: int = 2
    """Rank processes."""
    steps: int = 1500
    """Steps of a run."""
    evaluations: int = 5
    """Evaluations of a run, evenly spread, the last after the last step."""
    micro_batches: int = 8
    """Micro-batches per batch, for methods with a frozen window."""
    replica_groups: int = 2
    """Groups of ranks that hold a whole copy of the tables each, for 2d-sp."""
    data: DataConfig = field(
        default_factory=lambda: DataConfig(data_scale=0.002, users=28_000, batch_size=128, negatives=32)
    )
    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(embedding_dim=32, dense_layers=1, heads=1, width=32, sequence_length=20)
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def method_names(self) -> list[str]:
        return [name.strip() for name in self.methods.split(",") if name.strip()]


@dataclass(frozen=True)
class Curve:
    """One method's run with one seed. ``losses``: global loss of every step. ``quality``: by metric, its values after
    each number of steps in ``evaluated``."""

    method: str
    seed: int
    config: Mapping[str, Any]
    losses: Sequence[float]
    evaluated: Sequence[int]
    quality: Mapping[str, Sequence[float]]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def setting(self) -> str:
        """12 hex digits: curves of one setting may stand in one figure."""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:12]


#: (what runs, steps done, of all)
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


def identity(config: ConvergenceConfig) -> dict[str, Any]:
    """What decides a curve besides method and seed."""
    whole = dataclasses.asdict(config)
    return json.loads(json.dumps({name: value for name, value in whole.items() if name not in ("methods", "seeds")}))


def converge(config: ConvergenceConfig, folder: Path, progress: Progress | None = None) -> list[Curve]:
    """Every method with every seed, those that ``folder`` has already left out. Raises as ``training.runs``."""
    if not config.method_names or min(config.seeds, config.steps, config.evaluations) < 1:
        raise ConfigError("--seeds, --steps and --evaluations must be at least 1, and --methods name one")
    if config.evaluations > config.steps:
        raise ConfigError(
            f"--evaluations {config.evaluations} is more than --steps {config.steps}, must be at most that"
        )
    if config.seeds > MOST_SEEDS:
        raise ConfigError(f"--seeds {config.seeds} is too many, must be at most {MOST_SEEDS}")
    for name in config.method_names:
        validate(run_config(config, name, 1))
    runs = [(name, seed) for seed in range(1, config.seeds + 1) for name in config.method_names]
    found = {(c.method, c.seed): c for c in read_curves(folder) if c.config == identity(config)}
    load_dataset(config.data, config.model, 1)  # here first: what is wrong with the data is then said once
    curves = []
    with _pool_when_needed(config.workers) as pool:
        for number, (name, seed) in enumerate(runs):
            curve = found.get((name, seed))
            if curve is None:

                def show(rank: int, done: int, number: int = number, title: str = f"{name}, seed {seed}") -> None:
                    if progress:
                        progress(title, number * config.steps + done, len(runs) * config.steps)

                losses, evaluated, quality = pool.run(curve_on_rank, config, name, seed, on_message=show)[0]
                curve = Curve(name, seed, identity(config), losses, evaluated, quality, provenance())
                write_curve(folder, curve)
            curves.append(curve)
    return curves


class _pool_when_needed:
    """Ranks that start with the first job."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool: RankPool | None = None

    def __enter__(self) -> _pool_when_needed:
        return self

    def run(self, *arguments: Any, **options: Any) -> list[Any]:
        if self._pool is None:
            self._pool = RankPool(self._workers).__enter__()
        return self._pool.run(*arguments, timeout_s=24 * 3600.0, **options)

    def __exit__(self, *error: Any) -> None:
        if self._pool is not None:
            self._pool.__exit__(*error)


def curve_on_rank(
    config: ConvergenceConfig, name: str, seed: int
) -> tuple[list[float], list[int], dict[str, list[float]]]:
    """Run on each rank: losses (global), steps evaluated, metrics (rank 0; empty elsewhere). Collective."""
    run = run_config(config, name, seed)
    (method,) = run.chosen
    dataset = load_dataset(run.data, run.model, seed)
    rule = run.optimizer
    sparse = SparseOptimizer(rule.sparse_optimizer, rule.sparse_lr, rule.sparse_eps)
    spec = build_model_spec(run.training, dataset)
    trainer = method.build(spec, sparse, dense_optimizer(rule), seed, method.micro_batches or run.micro_batches)
    if name.endswith(ULP):
        nudge(trainer)
    rank, world = dist.get_rank(), dist.get_world_size()
    marks = {round(config.steps * n / config.evaluations) for n in range(1, config.evaluations + 1)}
    local, quality, told = [], dict[str, list[float]](), 0.0
    source: Iterator[Any] = dataset.batches(rank, world)
    for step in range(1, config.steps + 1):
        local.append(trainer.progress(source).loss)
        if step in marks:
            table = trainer.table("item")
            if rank == 0:
                model = spec.build(torch.nn.Identity())
                model.load_state_dict(dict(trainer.dense_state()), strict=True)
                for metric, value in evaluate(model, table, dataset).items():
                    quality.setdefault(metric, []).append(value)
        if rank == 0 and time.monotonic() - told > 0.2:
            told = time.monotonic()
            send_to_launcher(step)
    trainer.close()
    losses = torch.tensor(local, dtype=torch.float64)
    dist.all_reduce(losses)
    return losses.tolist(), sorted(marks), quality


def nudge(trainer: Trainer) -> None:
    """Move the largest dense weight by one unit in the last place, alike on every rank."""
    weight = max(trainer.dense_state().values(), key=lambda w: float(w.abs().max())).view(-1)
    at = weight.abs().argmax()
    weight[at] = torch.nextafter(weight[at], torch.tensor(torch.inf))


def write_curve(folder: Path, curve: Curve) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in curve.method).strip("-")
    path = folder / f"{name}-seed{curve.seed}-{curve.setting}.json"
    write_atomically(path, json.dumps({"schema": _SCHEMA, **dataclasses.asdict(curve)}, default=list) + "\n")
    return path


def read_curves(folder: Path) -> list[Curve]:
    """All curves of the folder, in order of file name; files that are none are passed over."""
    curves = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("schema") == _SCHEMA:
                curves.append(Curve(**data))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return curves
