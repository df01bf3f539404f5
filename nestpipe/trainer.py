"""The interface of every training method, and of the model that it trains.

It follows TorchRec's train pipelines: ``progress`` takes an iterator of batches and runs one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from nestpipe.data.batch import Batch
from nestpipe.data.tables import TableConfig
from nestpipe.measurement.trace import Span

#: What the sum of a batch's losses is divided by. ``samples``: the samples of the global batch. ``rank_samples``: for
#: each rank its own samples times the number of ranks, which gives the mean of the ranks' means, as in
#: DistributedDataParallel. ``ranks``: the number of ranks. ``count``: what the model counts, summed over all ranks.
DivideBy = Literal["samples", "rank_samples", "ranks", "count"]


@dataclass(frozen=True)
class ModelSpec:
    """A model, written once for all methods.

    ``build(embeddings)`` returns a module that uses an injected embedding module. It maps a batch to float32 losses
    [samples], one per sample, and the trainer divides their sum by the number of samples in the global batch. Its
    dense weights start as those of rank 0 if the engine trains it; other trainers need weights that depend only on the
    seed. ``summed``: the module returns the sum of the losses, a scalar, instead. ``divide_by``: see DivideBy; only
    the engine takes other values than ``samples``. With ``count`` the module returns (sum of losses, count), two
    scalars. A batch whose count is 0 changes weights only by what the optimizers do with zero gradients.
    """

    tables: tuple[TableConfig, ...]
    build: Callable[[nn.Module], nn.Module]
    summed: bool = False
    divide_by: DivideBy = "samples"


@dataclass(frozen=True)
class SparseOptimizer:
    """``sgd``, ``rowwise_adagrad``, or ``adam``, which only the engine has.

    The formulas are in ``nestpipe.embedding.sparse_optimizers``. State per row, float32: ``sgd`` none;
    ``rowwise_adagrad`` one value, the sum of the mean squared gradients; ``adam`` 2 dim + 1 values.
    """

    name: str = "rowwise_adagrad"
    lr: float = 0.05
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass(frozen=True)
class StepResult:
    """The result of one step on one rank.

    ``loss``: this rank's share, the sum of its per-sample losses divided by the samples of the global batch (or see
    DivideBy). ``global_loss``: the sum of all ranks' shares; None if the method does not compute it.
    ``samples``: the number of this rank's samples. ``embedding_bytes``: embedding
    rows that this rank received from other ranks and gradient rows that it sent to them in this step.
    ``minimum_embedding_bytes``: the same if each distinct key were sent once per batch. ``duplication_factor``: keys
    that this rank asked for, each once per micro-batch, divided by the distinct keys of its batch.
    ``replica_bytes``: what this rank sent to keep replicas of the tables equal (2D-SP), in a ring collective.
    """

    step: int
    loss: float
    samples: int
    embedding_bytes: int
    minimum_embedding_bytes: int
    duplication_factor: float
    replica_bytes: int = 0
    global_loss: float | None = None


@runtime_checkable
class Trainer(Protocol):
    """One training method on one rank. All ranks must make the same calls in the same order."""

    name: str

    @property
    def trained(self) -> int:
        """The number of batches trained, which is also the number of the next batch."""
        ...

    def progress(self, batches: Iterator[Batch]) -> StepResult:
        """Run one step. Raises StopIteration when the data of all ranks has ended and no batch is in flight.

        Another thread may read the iterator, some batches ahead.
        """
        ...

    def take_spans(self) -> list[Span]:
        """Spans of all finished operations since the last call."""
        ...

    def table(self, name: str) -> Tensor:
        """The whole table, float32 [rows, dim], on every rank. Collective, between steps. Waits for work in flight."""
        ...

    def dense_state(self) -> Mapping[str, Tensor]:
        """The dense weights by name."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """End threads and process groups. Collective, but local while an error is being handled (in ``finally``)."""
        ...


@runtime_checkable
class Reshardable(Trainer, Protocol):
    """A trainer whose checkpoint can be resumed on a different number of ranks."""

    def resharded(self, states: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any]:
        """A state for ``load_state_dict`` on this rank, made from the ``states`` of a different rank count.

        ``states`` has one state for each of the old ranks. ``step``: the next step on the new ranks. Raises
        ValueError if the states fit only the old number of ranks.
        """
        ...


DenseOptimizer = Callable[[list[nn.Parameter]], Any]
