"""What published step times say about a cluster, and the rates that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nestpipe.simulator.hardware import Hardware, ProfileError
from nestpipe.simulator.workload import Workload


@dataclass(frozen=True)
class Reference:
    """What published step times say about a cluster, in ms, for one workload; ``reference_hardware`` makes rates of it.

    All2All, both directions of a batch: C(n) = exchange_ms + exchange_per_worker_ms n (times
    (n - 1) / n: a worker keeps its own part). Lookup: L(n) = lookup_ms + lookup_per_worker_ms n +
    lookup_jump_ms [n > tier_workers]. A share ``routing_share`` of it is key routing, the rest is retrieval.
    """

    dense_ms: float
    """Forward and backward of a batch, including updates and the dense AllReduce."""
    hand_over_ms: float
    """Lookup that stays exposed when lookups are pipelined."""
    exchange_ms: float
    exchange_per_worker_ms: float
    lookup_ms: float
    lookup_per_worker_ms: float
    lookup_jump_ms: float
    replica_lookup: float
    """2D-SP's lookup relative to plain sharding."""
    replica_sync_ms: float
    """2D-SP's replica synchronisation, per batch."""
    groups: int = 4
    """2D-SP's replica groups."""
    tier_workers: int = 384
    """The lookup jumps beyond this many workers."""
    routing_share: float = 0.5
    """Share of the lookup that is key routing."""
    forward_share: float = 1 / 3
    """Share of the dense time that the forward takes."""
    micro_batches: int = 8
    """Micro-batches of FWP."""
    micro_batch_ms: float = 0.9
    """Additional dense time of every micro-batch (the efficiency curve)."""
    at_workers: int = 1
    """Number of workers at which the times hold, for data whose rows per owner shrink with the workers."""


def reference_from_table(name: str, table: Mapping[str, float]) -> Reference:
    """``[reference]`` of a profile. Raises ProfileError naming the profile."""
    for key, value in table.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ProfileError(f"hardware '{name}': {key} must be a number of at least 0, not {value!r}")
    try:
        return Reference(**table)  # type: ignore[arg-type]
    except TypeError as error:
        raise ProfileError(f"hardware '{name}': {error}") from error


def reference_hardware(name: str, reference: Reference, workload: Workload, notes: tuple[str, ...] = ()) -> Hardware:
    """Rates at which ``workload`` takes the times of ``reference``. Raises ProfileError for times not above 0."""
    r = reference
    for key in ("dense_ms", "exchange_ms", "lookup_ms"):
        if not getattr(r, key) > 0:
            raise ProfileError(f"hardware '{name}': {key} is {getattr(r, key)}; it must be above 0")
    moved = workload.rows(r.at_workers) * workload.row_bytes
    sent = workload.distinct * workload.embedding_bytes
    ring = 2 * (r.groups - 1) / r.groups * r.exchange_ms / 2
    return Hardware(
        name=name,
        origin="published",
        flops_per_s=workload.dense_flops / (r.dense_ms * 1e-3),
        half_rate_samples=r.micro_batch_ms / r.dense_ms * workload.batch_size,
        forward_share=r.forward_share,
        hand_over_s=r.hand_over_ms * 1e-3,
        routing_keys_per_s=_rate(workload.key_count, r.lookup_ms * r.routing_share),
        host_bytes_per_s=_rate(moved, r.lookup_ms * (1 - r.routing_share)),
        network_bytes_per_s=_rate(sent, r.exchange_ms / 2),
        exchange_half_workers=_half(r.exchange_ms, r.exchange_per_worker_ms),
        lookup_half_workers=_half(r.lookup_ms, r.lookup_per_worker_ms),
        lookup_tier_workers=r.tier_workers,
        lookup_tier_penalty=r.lookup_jump_ms / r.lookup_ms,
        replica_lookup=r.replica_lookup,
        replica_sync=r.replica_sync_ms / ring if r.groups > 1 else 0.0,
        notes=notes,
    )


def _half(base: float, slope: float) -> float:
    """Number of workers at which the part that grows by ``slope`` per worker is as long as ``base``."""
    return base / slope if slope > 0 else math.inf


def _rate(amount: float, ms: float) -> float:
    return amount / (ms * 1e-3) if ms > 0 else math.inf
