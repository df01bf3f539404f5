"""Typed configuration of a run: every option with its default and its limits, checked at construction.

These are frozen dataclasses, and they import no torch. Their docstrings are the command line's help.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from nestpipe.schedule.operations import MAX_MICRO_BATCHES
from nestpipe.testbed.testbed import parse_testbed

#: Share of a paced dense time (see models/pacing.py) that the forward takes.
PACED_FORWARD = 1 / 3
#: Steps at the start of a round that are not reported: a paused pipeline has prefetched for free.
WARM_UP_STEPS = 4

#: Far beyond what anybody trains: a typing error is reported at once, before the machine runs out of memory.
MAX_SIZES = {
    "batch_size": 1 << 20,
    "negatives": 1 << 20,
    "interest_clusters": 1 << 20,
    "users": 1 << 30,
    "embedding_dim": 1 << 16,
    "dense_layers": 1 << 10,
    "heads": 1 << 10,
    "width": 1 << 16,
    "sequence_length": 1 << 20,
}


#: The largest whole number that an option takes.
MAX_OPTION = 2**31 - 1
MAX_OPTIONS = {"--workers": 8192, "--micro-batches": MAX_MICRO_BATCHES}
#: The longest single wait: it is counted in milliseconds as a C int.
MAX_TIMEOUT_S = 2_000_000


class ConfigError(ValueError):
    """A configuration that cannot be run. The message is one line and names options as on the command line."""

    def in_file(self) -> str:
        """The line with options named as a file writes them: ``pace_dense`` for ``--pace-dense``."""
        return re.sub(r"--([a-z][a-z-]*)", lambda option: option[1].replace("-", "_"), str(self))


def _require_size(name: str, value: int, least: int = 1) -> None:
    _require(value >= least, f"{name} is {value}; it must be at least {least}")
    _require(value <= MAX_SIZES[name], f"{name} is {value}; it must be at most {MAX_SIZES[name]}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class DataConfig:
    """The training data."""

    dataset: Literal["synthetic", "movielens", "kuairand"] = "synthetic"
    """synthetic: drawn from KuaiRand-27K's real histograms; movielens, kuairand: the published files at --data-path."""
    data_path: str | None = None
    """File or folder of the data set (not for synthetic)."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do about a malformed row: stop and name the file and line, or skip and count it."""
    data_scale: float = 0.001
    """synthetic: items and interactions relative to KuaiRand-27K (32,038,693 videos, 322,278,385 interactions).

    The number of users (27,285) and the interactions per user each scale with its square root."""
    users: int | None = None
    """synthetic: this many users share the interactions, instead of the number that data_scale gives."""
    interest_clusters: int = 32
    """synthetic: groups of users that share interests."""
    batch_size: int = 64
    """Samples per worker and step."""
    negatives: int = 64
    """Sampled negatives per sample."""
    windows: Literal["last", "all"] = "all"
    """Samples of a history longer than the model reads: only its latest items, or all of it in consecutive pieces."""

    def __post_init__(self) -> None:
        _require(0 < self.data_scale < math.inf, f"data_scale is {self.data_scale}; it must be a number above 0")
        _require(self.data_scale <= 100, f"data_scale is {self.data_scale}; it must be at most 100")
        if self.users is not None:
            _require_size("users", self.users, least=2)
        for name in ("interest_clusters", "batch_size", "negatives"):
            _require_size(name, getattr(self, name))


@dataclass(frozen=True)
class ModelConfig:
    """The dense network."""

    backbone: Literal["hstu", "fuxi"] = "hstu"
    """hstu (arXiv 2402.17152), the paper's on NPUs, or fuxi (FuXi-alpha, arXiv 2502.03036), the paper's on GPUs."""
    embedding_dim: int = 64
    """Elements per embedding row."""
    dense_layers: int = 2
    """Blocks of the backbone."""
    heads: int = 2
    """Attention heads per block."""
    width: int = 64
    """Elements of the dense network's hidden state (a linear layer connects it to embedding_dim if they differ)."""
    sequence_length: int = 50
    """Longest history, in items; older items are cut."""

    def __post_init__(self) -> None:
        for name in ("embedding_dim", "dense_layers", "heads", "width", "sequence_length"):
            _require_size(name, getattr(self, name))
        _require(self.width % self.heads == 0, f"width {self.width} is not divisible by heads {self.heads}")


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights are updated."""

    sparse_optimizer: Literal["sgd", "rowwise_adagrad", "adam"] = "rowwise_adagrad"
    """Update rule of the embedding rows (adam: only methods that this engine runs, not real TorchRec on a CPU)."""
    sparse_lr: float = 0.05
    """Learning rate of the embedding rows."""
    sparse_eps: float = 1e-8
    """Epsilon of AdaGrad and Adam."""
    dense_optimizer: Literal["sgd", "adam"] = "adam"
    """Optimizer of the dense network (torch.optim)."""
    dense_lr: float = 1e-3
    """Learning rate of the dense network."""

    def __post_init__(self) -> None:
        for name in ("sparse_lr", "sparse_eps", "dense_lr"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"{name} is {value}; it must be a number of at least 0")


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides what is learned; it is the same for all methods that are compared."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    seed: int = 1
    """Seed of the data, the initial weights and the negatives."""
    pace_dense_ms: float = 0.0
    """Stretch the dense forward and backward of a batch to this many ms: a stand-in for an accelerator."""


@dataclass(frozen=True)
class RunConfig:
    """Train one or several methods on the same model, data and seed, and report what was hidden behind what.

    Raises ConfigError if no method could run with it, or ValueError for its testbed. ``nestpipe.methods.methods_of``
    finds the methods, and raises for what depends on them.
    """

    methods: str = "serial,nestpipe,torchrec"
    """Comma-separated methods; serial(8) fixes the number of micro-batches of one."""
    workers: int = 2
    """Rank processes."""
    steps: int = 20
    """Steps per method that are reported; each round runs 4 more to warm up."""
    rounds: int = 2
    """Interleaved rounds that the steps are split over, so that drift of the machine affects all methods alike."""
    epochs: int | None = None
    """Train this many passes over the data instead of `steps`."""
    micro_batches: int = 8
    """Micro-batches per batch, for methods with a frozen window."""
    clustering: bool = False
    """Put samples that share keys into one micro-batch (key-centric clustering), so that fewer keys travel."""
    replica_groups: int = 2
    """Groups of ranks, each with a whole copy of the tables, for methods that replicate tables (2d-sp)."""
    sync_interval: int = 1
    """Average 2d-sp's replicas every this many batches."""
    testbed: str = "loopback"
    """loopback, or netns:200mbit,1ms: one host per rank in its network namespace, with this rate and one-way delay."""
    pace_dense: float = 0.0
    """Stretch the dense forward and backward of a batch to this many ms: a stand-in for an accelerator (0: off)."""
    evaluate: bool = False
    """Compute HR and NDCG of every method at the end."""
    seed: int = 1
    """Seed of the data order, the initial weights and the negatives."""
    timeout: float = 3600.0
    """Seconds after which the run is ended and the stacks of all ranks are shown."""
    checkpoint: str | None = None
    """Folder for checkpoints, with one subfolder per method."""
    checkpoint_every: int = 0
    """Save a checkpoint every this many steps of a method (0: only when told to, as by Slurm before preemption)."""
    resume: bool = False
    """Resume from the newest checkpoints in --checkpoint; methods without one start from the beginning."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        _require(bool(self.method_names), "--methods names no method; try --methods serial,nestpipe,torchrec")
        twice = len(set(self.method_names)) < len(self.method_names)
        _require(not twice, f"--methods names a method twice: {self.methods}")
        for name in ("workers", "steps", "rounds", "micro_batches", "replica_groups", "sync_interval", "epochs"):
            if (value := getattr(self, name)) is not None:
                _require_count("--" + name.replace("_", "-"), value)
        _require(self.rounds <= self.steps, f"--rounds {self.rounds} is more than --steps {self.steps}")
        paced = 0 <= self.pace_dense < math.inf
        _require(paced, f"--pace-dense must be 0 or more milliseconds, not {self.pace_dense}")
        _require(self.timeout > 0, f"--timeout must be above 0 seconds, not {self.timeout}")
        limit = f"{MAX_TIMEOUT_S} seconds (23 days)"
        _require(self.timeout <= MAX_TIMEOUT_S, f"--timeout must be at most {limit}, not {self.timeout:g}")
        _require(self.seed >= 0, f"--seed must not be negative, got {self.seed}")
        _require(self.seed <= MAX_OPTION, f"--seed must be at most {MAX_OPTION}, got {self.seed}")
        parse_testbed(self.testbed)
        saves = self.checkpoint_every or self.resume
        _require(not saves or bool(self.checkpoint), "--checkpoint-every and --resume need a folder: --checkpoint DIR")
        _require(self.checkpoint_every >= 0, f"--checkpoint-every must not be negative, got {self.checkpoint_every}")

    @property
    def training(self) -> TrainingConfig:
        return TrainingConfig(self.data, self.model, self.optimizer, self.seed, self.pace_dense)

    @property
    def method_names(self) -> list[str]:
        return names_in(self.methods)

    def steps_of_rounds(self, steps_of_epochs: int) -> list[int]:
        """Steps of each round, warm-up included; epochs are one round of ``steps_of_epochs``."""
        if self.epochs is not None:
            return [steps_of_epochs]
        share, larger = divmod(self.steps, self.rounds)
        return [WARM_UP_STEPS + share + (r < larger) for r in range(self.rounds)]

    def in_record(self, micro_batches: int) -> dict[str, Any]:
        """The settings that identify a run of a method, without those that a record stores in its own fields."""
        elsewhere = ("methods", "workers", "seed", "testbed", "timeout", "checkpoint", "checkpoint_every", "resume")
        whole = {**dataclasses.asdict(self), "micro_batches": micro_batches}
        return {name: value for name, value in whole.items() if name not in elsewhere}


def _require_count(option: str, value: int) -> None:
    _require(value >= 1, f"{option} must be at least 1, not {value}")
    most = MAX_OPTIONS.get(option, MAX_OPTION)
    _require(value <= most, f"{option} must be at most {most}, not {value}")


def names_in(text: str) -> list[str]:
    """The names in comma-separated text such as ``"serial, nestpipe"``."""
    return [name.strip() for name in text.split(",") if name.strip()]
