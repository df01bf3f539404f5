"""Predicts the node hours of a grid before anything is submitted: simulated step times, multiplied by nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from nestpipe.config import WARM_UP_STEPS
from nestpipe.methods import SERIAL, Method, find_method
from nestpipe.simulator.cost import ClusterError, cluster_of, stage_seconds
from nestpipe.simulator.profile import load_profile, resized
from nestpipe.simulator.step_times import seconds_per_op, steady_plan, steady_step_ms
from slurm.grid import JobCluster, shape
from slurm.point import Point


@dataclass(frozen=True)
class Prediction:
    """``step_ms``: a steady step; ``node_hours``: nodes x (start + all steps), 0 for a point that is only simulated."""

    step_ms: float
    node_hours: float


def stand_in(name: str) -> Method:
    """The method that predicts the node hours of ``name``: itself, or ``serial`` if it cannot be priced."""
    method = find_method(name)
    return SERIAL if method.why_not_priced else method


def predict(points: Iterable[Point], cluster: JobCluster) -> dict[str, Prediction]:
    """Predictions by the point's hash. Raises ProfileError or WorkloadError if the hardware profile cannot be used."""
    profile = load_profile(cluster.hardware)
    costs: dict[tuple[Method, int], list[tuple[Point, Mapping[str, float]]]] = {}
    for point in points:
        method = stand_in(point.method)
        workload = resized(
            profile.workload,
            point["embedding_dim"],
            point["dense_layers"],
            point["sequence_length"],
            point["batch_size"],
        )
        workload = replace(workload, width=point["width"], negatives=point["negatives"])
        try:
            place = cluster_of(method, profile.hardware, point.workers, point["replica_groups"])
        except ClusterError:
            place = cluster_of(method, profile.hardware, point.workers, 1)
        micro_batches = method.micro_batches_of(point.micro_batches)
        stages = stage_seconds(place, workload, micro_batches)
        costs.setdefault((method, micro_batches), []).append((point, stages))
    predictions = {}
    for (method, micro_batches), group in costs.items():
        plan = steady_plan(method, micro_batches, profile.hardware.one_link)
        steps = steady_step_ms(plan, seconds_per_op(plan, [stages for _, stages in group]))
        for (point, _), step_ms in zip(group, steps, strict=True):
            predictions[point.hash] = _prediction(point, cluster, float(step_ms))
    return predictions


def _prediction(point: Point, cluster: JobCluster, step_ms: float) -> Prediction:
    if point.simulated:
        return Prediction(step_ms, 0.0)
    step_ms = max(step_ms, point["pace_dense"])
    total = point["steps"] + WARM_UP_STEPS * point["rounds"]
    nodes, _ = shape(point, cluster)
    return Prediction(step_ms, nodes * (cluster.start_s + total * step_ms / 1e3) / 3600)
