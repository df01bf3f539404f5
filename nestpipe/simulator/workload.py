"""The workload: what one batch costs in operations, bytes, rows and keys on any cluster.

Counts of keys come from ``KeyStatistics``, which the project's own router measures (see
``calibrate.key_sampling``); the rest follows from the model's dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


class WorkloadError(ValueError):
    """An impossible workload. The message says in one line what is wrong."""


@dataclass(frozen=True)
class KeyStatistics:
    """How the keys of batches repeat.

    ``keys_per_sample``: keys looked up, before deduplication. ``distinct_share``: distinct keys of a
    worker's batch / its keys. ``duplication``: by micro-batches N, keys that travel / distinct keys.
    ``rows_exponent``: distinct rows of the whole cluster's batch grow as workers to this power (Heaps'
    law). ``overlap``, ``overlap_growth``: share of a batch's rows that the previous batch touched too,
    on one worker, and its growth per doubling of the workers. ``error``: relative error of the
    extrapolation to more workers, measured on the largest sample, which was held out.
    """

    keys_per_sample: float
    distinct_share: float = 1.0
    duplication: Mapping[int, float] = field(default_factory=dict)
    rows_exponent: float = 1.0
    overlap: float = 0.0
    overlap_growth: float = 0.0
    error: float = 0.0
    source: str = "assumed: no key repeats"

    def duplication_at(self, micro_batches: int) -> float:
        """Log-linear between the measured N, flat beyond them; 1 if none were measured or N = 1."""
        if micro_batches == 1 or not self.duplication:
            return 1.0
        known = sorted({1: 1.0, **self.duplication}.items())
        logs = [math.log2(n) for n, _ in known]
        return float(np.interp(math.log2(micro_batches), logs, [factor for _, factor in known]))

    def overlap_at(self, workers: int) -> float:
        return min(1.0, max(0.0, self.overlap + self.overlap_growth * math.log2(workers)))


@dataclass(frozen=True)
class Workload:
    """A model and its batches, per worker and step. Rows and activations are float32."""

    keys: KeyStatistics
    embedding_dim: int = 512
    """Elements per embedding row."""
    dense_layers: int = 4
    """HSTU blocks."""
    width: int = 512
    """Elements of the dense network's hidden state."""
    sequence_length: int = 1024
    """Items per sample that the dense network computes."""
    batch_size: int = 512
    """Samples per worker and step."""
    negatives: int = 64
    """Sampled negatives per sample."""
    state_elements: int = 1
    """Elements of optimizer state per row, moved with it between host and device (row-wise AdaGrad: 1)."""

    pace_dense_s: float = 0.0
    """Dense forward and backward of a batch last at least this long (see models/pacing.py)."""

    def __post_init__(self) -> None:
        for name in ("embedding_dim", "dense_layers", "width", "sequence_length", "batch_size"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{name.replace('_', ' ')} is {getattr(self, name)}; it must be at least 1")
        if self.negatives < 0 or self.state_elements < 0:
            raise WorkloadError("negatives and optimizer state cannot be negative")

    @property
    def dense_flops(self) -> float:
        """FLOP of a batch's forward and backward (twice the forward).

        HSTU (arXiv 2402.17152), per position of t and block of width w: projections to U, V, Q, K and
        back 10 w^2, attention 4 t w (computed over all t positions, masked after); a linear layer from
        the embedding, and the dot products with 1 + negatives items. A multiply-add counts as two.
        """
        t, w, d = self.sequence_length, self.width, self.embedding_dim
        per_position = self.dense_layers * (10 * w * w + 4 * t * w) + 4 * d * w + 2 * (1 + self.negatives) * d
        return 3.0 * self.batch_size * t * per_position

    @property
    def dense_bytes(self) -> float:
        """Bytes of the dense weights, float32."""
        w, d = self.width, self.embedding_dim
        return 4.0 * (self.dense_layers * (5 * w * w + 9 * w) + 2 * d * w + self.sequence_length * w)

    @property
    def key_count(self) -> float:
        """Keys of a worker's batch."""
        return self.batch_size * self.keys.keys_per_sample

    @property
    def distinct(self) -> float:
        """Distinct keys of a worker's batch: rows that it must receive at least once."""
        return self.key_count * self.keys.distinct_share

    def rows(self, workers: int) -> float:
        """Distinct rows that one owner retrieves for the batch of all ``workers``."""
        return self.distinct * workers ** (self.keys.rows_exponent - 1)

    @property
    def row_bytes(self) -> float:
        """A row on its way between host and device: weight and optimizer state."""
        return 4.0 * (self.embedding_dim + self.state_elements)

    @property
    def embedding_bytes(self) -> float:
        """Bytes of a row's weight or gradient in an All2All."""
        return 4.0 * self.embedding_dim

    @property
    def input_bytes(self) -> float:
        """A batch's keys and side information on their way to the device, int64 each."""
        return 16.0 * self.key_count
