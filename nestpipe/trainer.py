"""The interface of every training method, and the model it takes.

It follows TorchRec's train pipelines: ``progress`` takes the iterator of batches and runs one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from nestpipe.data.batch import Batch
from nestpipe.data.tables import TableConfig
from nestpipe.measurement.trace import Span


@dataclass(frozen=True)
class ModelSpec:
    """A model, written once for every method.

    ``build(embeddings)`` returns the module around an injected embedding module. The module maps a
    batch to float32 losses [samples], one per sample; the trainer divides their sum by the samples
    of the global batch. ``summed``: the module gives their sum, a scalar, instead. Its dense weights must
    depend on the seed only.
    """

    tables: tuple[TableConfig, ...]
    build: Callable[[nn.Module], nn.Module]
    summed: bool = False


@dataclass(frozen=True)
class SparseOptimizer:
    """``sgd``, ``rowwise_adagrad`` or ``adam`` (the engine only); formulas: ``nestpipe.embedding.sparse_optimizers``.

    State per row, float32: none; one, the mean over the dim of squared gradients; 2 dim + 1.
    """

    name: str = "rowwise_adagrad"
    lr: float = 0.05
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass(frozen=True)
class StepResult:
    """What one step of one rank gave.

    ``loss``: this rank's share, sum of its per-sample losses / samples of the global batch; the
    global loss is the sum over ranks. ``samples``: this rank's samples. ``embedding_bytes``: embedding
    rows that this rank got from other ranks and gradient rows that it sent them in this step;
    ``minimum_embedding_bytes``: the same had each distinct key travelled once per batch.
    ``replica_bytes``: what this rank sent to keep replicas of the tables equal (2D-SP), as a ring sends it.
    ``duplication_factor``: keys that travelled / distinct keys of the rank's batch.
    """

    step: int
    loss: float
    samples: int
    embedding_bytes: int
    minimum_embedding_bytes: int
    duplication_factor: float
    replica_bytes: int = 0


@runtime_checkable
class Trainer(Protocol):
    """One training method on one rank. All ranks must make the same calls in the same order."""

    name: str

    @property
    def trained(self) -> int:
        """Batches trained; also the batch that comes next."""
        ...

    def progress(self, batches: Iterator[Batch]) -> StepResult:
        """Run one step. Raises StopIteration once the data of all ranks has ended and no batch is in flight."""
        ...

    def take_spans(self) -> list[Span]:
        """Spans of all finished operations since the last call."""
        ...

    def table(self, name: str) -> Tensor:
        """The whole table, float32 [rows, dim], on every rank. Collective, between steps; waits for work in flight."""
        ...

    def dense_state(self) -> Mapping[str, Tensor]:
        """The dense weights by name."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """End threads and process groups. Collective, unless an error is being handled (``finally``): then local."""
        ...


@runtime_checkable
class Reshardable(Trainer, Protocol):
    """A trainer whose checkpoint can be resumed with another number of ranks."""

    def resharded(self, states: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any]:
        """A state for ``load_state_dict`` on this rank, made from the ``states`` of all ranks of another number of
        ranks; ``step``: the next step here. Raises ValueError if they fit their own number of ranks only."""
        ...


DenseOptimizer = Callable[[list[nn.Parameter]], Any]
