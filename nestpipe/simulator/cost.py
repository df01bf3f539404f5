"""The cost of an operation: (hardware, workload, stage, workers, micro-batches) -> seconds.

There is one function for every method. Methods differ only in their schedules and, for two-dimensional
sharding, in the number of replica groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nestpipe.config import PACED_FORWARD
from nestpipe.methods import Method
from nestpipe.schedule.stages import of_stage
from nestpipe.simulator.hardware import Hardware
from nestpipe.simulator.workload import Workload

_KEY_BYTES = 8.0
_ADAM_PASSES = 7.0  # weight, gradient, two moments read; weight and moments written
_UPDATE_PASSES = 3.0  # row and gradient read, row written


class ClusterError(ValueError):
    """An impossible cluster. The message says in one line what is wrong."""


@dataclass(frozen=True)
class Cluster:
    """Workers with the same hardware, in ``groups`` replica groups of equal size (1: plain sharding)."""

    hardware: Hardware
    workers: int
    groups: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1 or self.groups < 1:
            raise ClusterError(f"{self.workers} workers in {self.groups} groups: both must be at least 1")
        if self.workers % self.groups:
            raise ClusterError(f"{self.workers} workers cannot be split into {self.groups} groups of equal size")

    @property
    def group_size(self) -> int:
        """Workers that share one copy of the tables."""
        return self.workers // self.groups


def cluster_of(method: Method, hardware: Hardware, workers: int, groups: int) -> Cluster:
    """The cluster as ``method`` sees it: in ``groups`` replica groups if it replicates tables. Raises ClusterError."""
    return Cluster(hardware, workers, groups if method.replicated else 1)


def stage_seconds(cluster: Cluster, workload: Workload, micro_batches: int) -> dict[str, float]:
    """Seconds of one operation of each stage (of one micro-batch if the stage has micro-batches), without jitter.

    A collective is timed from when all members have entered. Raises ClusterError for more micro-batches than samples.
    """
    if not 1 <= micro_batches <= workload.batch_size:
        raise ClusterError(f"{micro_batches} micro-batches of {workload.batch_size} samples: choose 1..batch size")
    h, w, n = cluster.hardware, workload, cluster.workers
    rows, overlap = w.rows(cluster.group_size), w.keys.overlap_at(cluster.group_size)
    dense = dense_seconds(h, w, micro_batches)
    sent = w.distinct * w.keys.duplication_at(micro_batches) / micro_batches * w.embedding_bytes
    exchange = all2all_seconds(cluster, sent)
    growth = lookup_growth(h, n) * (h.replica_lookup if cluster.groups > 1 else 1.0)
    moved = rows * w.row_bytes
    seconds = {
        "P": w.batch_size / h.input_samples_per_s,
        "H": w.input_bytes / h.pcie_bytes_per_s,
        "K": w.key_count / h.routing_keys_per_s * growth
        + all2all_seconds(cluster, w.distinct * _KEY_BYTES)
        + all2all_seconds(cluster, 0.0),  # sizes first
        "R": rows * (h.host_row_s + w.row_bytes / h.host_bytes_per_s) * growth + moved / h.pcie_bytes_per_s,
        "S": h.hand_over_s + 2 * overlap * moved / h.hbm_bytes_per_s,
        "E": exchange,
        "F": dense * h.forward_share,
        "B": dense * (1 - h.forward_share),
        "G": exchange,
        "D": replica_sync_seconds(cluster, sent),
        "A": allreduce_seconds(h, n, w.dense_bytes),
        "U": _UPDATE_PASSES * moved / h.hbm_bytes_per_s,
        "O": _ADAM_PASSES * w.dense_bytes / h.hbm_bytes_per_s,
        "W": moved / h.write_bytes_per_s + moved / h.pcie_bytes_per_s,
    }
    alone = {"E", "G", "D"} if cluster.group_size == 1 else {"D"} if cluster.groups == 1 else set()
    alone |= {"A"} if n == 1 else set()
    for stage, fixed in h.stage_overhead.items():
        seconds[stage] = price(seconds, stage) + (0.0 if stage in alone else fixed)
    pace = w.pace_dense_s / micro_batches
    expand = w.key_count * w.embedding_bytes / micro_batches / h.expand_bytes_per_s
    return {
        **seconds,
        "F": max(seconds["F"], pace * PACED_FORWARD) + expand,
        "B": max(seconds["B"], pace * (1 - PACED_FORWARD)) + expand,
    }


def price(seconds: Mapping[str, float], stage: str) -> float:
    """The stage's entry in ``stage_seconds``. Raises ValueError for a stage that has none."""
    return of_stage(seconds, stage, "a price for the simulator", "stage_seconds in nestpipe/simulator/cost.py")


def dense_seconds(hardware: Hardware, workload: Workload, micro_batches: int) -> float:
    """Forward and backward of one micro-batch: b samples at b / (b + half_rate_samples) of the full rate."""
    samples = workload.batch_size / micro_batches
    efficiency = samples / (samples + hardware.half_rate_samples)
    return workload.dense_flops / micro_batches / (hardware.flops_per_s * efficiency)


def all2all_seconds(cluster: Cluster, sent: float) -> float:
    """An All2All inside a group, ``sent`` bytes from every worker, spread evenly over the group.

    Traffic inside a node and traffic that leaves it travel at the same time. Congestion between nodes grows
    linearly with the members: bandwidth(m) = bandwidth / (1 + m / exchange_half_workers).
    """
    h, members = cluster.hardware, cluster.group_size
    if members == 1:
        return 0.0
    on_node = min(h.workers_per_node, members)
    intra = sent * (on_node - 1) / members / h.intra_bytes_per_s
    congestion = 1 + members / h.exchange_half_workers
    inter = sent * (members - on_node) / members / h.network_bytes_per_s * congestion
    return h.collective_latency_s + (members - 1) * h.peer_latency_s + max(intra, inter)


def replica_sync_seconds(cluster: Cluster, sent: float) -> float:
    """2D-SP: AllReduce of ``sent`` bytes among the replicas, as a ring moves them, times ``replica_sync``."""
    h, groups = cluster.hardware, cluster.groups
    if groups == 1:
        return 0.0
    return h.replica_sync * 2 * (groups - 1) / groups * sent / h.network_bytes_per_s + h.collective_latency_s


def allreduce_seconds(hardware: Hardware, workers: int, size: float) -> float:
    """A ring: 2 (n - 1) / n of ``size`` bytes through every link, and a latency that grows with log2 n."""
    if workers == 1:
        return 0.0
    ring = 2 * (workers - 1) / workers * size / hardware.allreduce_bytes_per_s
    return ring + hardware.collective_latency_s * math.log2(workers)


def lookup_growth(hardware: Hardware, workers: int) -> float:
    """Key routing and retrieval relative to few workers: linear growth, and a jump at a tier (cause not known)."""
    jump = hardware.lookup_tier_penalty if workers > hardware.lookup_tier_workers else 0.0
    return 1 + workers / hardware.lookup_half_workers + jump
