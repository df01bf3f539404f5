"""Typed configuration of a run. Frozen dataclasses; docstrings are the command line's help."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

#: Part of a paced dense time (see models/pacing.py) that is forward.
PACED_FORWARD = 1 / 3

#: Far beyond what anybody trains: a slip of the keyboard is said at once, not by a machine that runs out of memory.
LIMITS = {
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


def _require_size(name: str, value: int, least: int = 1) -> None:
    _require(value >= least, f"{name} is {value}; it must be at least {least}")
    _require(value <= LIMITS[name], f"{name} is {value}; it must be at most {LIMITS[name]}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class DataConfig:
    """What is trained on."""

    dataset: Literal["synthetic", "movielens", "kuairand"] = "synthetic"
    """synthetic: drawn from KuaiRand-27K's real histograms; movielens, kuairand: the published files at --data-path."""
    data_path: str | None = None
    """File or folder of the data set (not for synthetic)."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A malformed row: stop and name file and line, or skip and count."""
    data_scale: float = 0.001
    """synthetic: items and interactions relative to KuaiRand-27K (32,038,693 videos, 322,278,385 interactions).

    Users (27,285) and interactions per user shrink by its square root each."""
    users: int | None = None
    """synthetic: this many users share the interactions, instead of the number that data_scale gives."""
    interest_clusters: int = 32
    """synthetic: groups of users that share interests."""
    batch_size: int = 64
    """Samples per worker and step."""
    negatives: int = 64
    """Sampled negatives per sample."""
    windows: Literal["last", "all"] = "all"
    """Samples of a history longer than the model reads: the latest items alone, or consecutive pieces of it."""

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
    """hstu (arXiv 2402.17152), or fuxi (FuXi-alpha, arXiv 2502.03036): the paper's on NPUs and on GPUs."""
    embedding_dim: int = 64
    """Elements per embedding row."""
    dense_layers: int = 2
    """Blocks of the backbone."""
    heads: int = 2
    """Attention heads per block."""
    width: int = 64
    """Elements of the dense network's hidden state (a linear layer joins it to embedding_dim where they differ)."""
    sequence_length: int = 50
    """Longest history, in items; older items are cut."""

    def __post_init__(self) -> None:
        for name in ("embedding_dim", "dense_layers", "heads", "width", "sequence_length"):
            _require_size(name, getattr(self, name))
        _require(self.width % self.heads == 0, f"width {self.width} is not divisible by heads {self.heads}")


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights move."""

    sparse_optimizer: Literal["sgd", "rowwise_adagrad", "adam"] = "rowwise_adagrad"
    """Update rule of the embedding rows (adam: methods that this engine runs, not real TorchRec on a CPU)."""
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
    """Everything that decides what is learned: equal for every method that is compared."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    seed: int = 1
    """Seeds data, initial weights and negatives."""
    pace_dense_ms: float = 0.0
    """Stretch the dense forward and backward of a batch to this many ms: a stand-in for an accelerator."""
