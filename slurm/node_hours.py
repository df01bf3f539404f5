"""Node hours of a grid before anything is submitted: the simulator's steps, times nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from baselines.simulated import METHODS
from nestpipe.simulator.cost import Cluster as SimulatedCluster
from nestpipe.simulator.cost import ClusterError, stage_seconds
from nestpipe.simulator.profile import load_profile, resized
from nestpipe.simulator.step_times import steady_step
from slurm.grid import Cluster, shape
from slurm.point import Point

#: Steps that a round runs and does not report, as ``nestpipe.training.runs`` has it (which imports torch).
WARM_UP_STEPS = 4


@dataclass(frozen=True)
class Prediction:
    """``step_ms``: a steady step; ``node_hours``: nodes x (start + all steps), 0 for a point that is only simulated."""

    step_ms: float
    node_hours: float


def stand_in(method: str) -> str:
    """The simulated method that predicts ``method``: itself, or ``serial`` where it has no schedule of its own."""
    name = method.split("(")[0]
    return name if name in METHODS else "serial"


def predict(points: Iterable[Point], cluster: Cluster) -> dict[str, Prediction]:
    """By point's hash. Raises ProfileError or WorkloadError where the hardware profile cannot be used."""
    profile = load_profile(cluster.hardware)
    costs: dict[tuple[str, int], list[tuple[Point, Mapping[str, float]]]] = {}
    for point in points:
        method = METHODS[stand_in(point.method)]
        workload = resized(
            profile.workload,
            point["embedding_dim"],
            point["dense_layers"],
            point["sequence_length"],
            point["batch_size"],
        )
        workload = replace(workload, width=point["width"], negatives=point["negatives"])
        groups = point["replica_groups"] if method.grouped else 1
        try:
            place = SimulatedCluster(profile.hardware, point.workers, groups)
        except ClusterError:
            place = SimulatedCluster(profile.hardware, point.workers)
        micro_batches = method.micro_batches or point.micro_batches
        stages = stage_seconds(place, workload, micro_batches)
        costs.setdefault((method.name, micro_batches), []).append((point, stages))
    predictions = {}
    for (name, micro_batches), group in costs.items():
        stage_tables = [stages for _, stages in group]
        steps = steady_step(METHODS[name], micro_batches, stage_tables, profile.hardware.one_link)
        for (point, _), step_ms in zip(group, steps, strict=True):
            predictions[point.hash] = _prediction(point, cluster, float(step_ms))
    return predictions


def _prediction(point: Point, cluster: Cluster, step_ms: float) -> Prediction:
    if point.simulated:
        return Prediction(step_ms, 0.0)
    step_ms = max(step_ms, point["pace_dense"])
    total = point["steps"] + WARM_UP_STEPS * point["rounds"]
    nodes, _ = shape(point, cluster)
    return Prediction(step_ms, nodes * (cluster.start_s + total * step_ms / 1e3) / 3600)
