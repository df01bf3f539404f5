"""The simulator compared with what notes on the paper say about its figures, and the micro-batch sweep of Fig. 9.

Synthetic data and its measured key repetition were frozen before the comparison. What the model
does not explain is stated in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nestpipe.methods import Method
from nestpipe.simulator.cost import Cluster, cluster_of, stage_seconds
from nestpipe.simulator.fit.least_squares import PublishedNumber
from nestpipe.simulator.key_statistics import unclustered
from nestpipe.simulator.profile import Profile, load_profile, resized
from nestpipe.simulator.reference import reference_hardware
from nestpipe.simulator.step_times import steady_account

NPU, GPU = "npu-1536-industrial", "gpu-128-kuairand"


@dataclass(frozen=True)
class NotePoint:
    """A published point (mark N) and the simulated one, in ``unit``. ``remark``: why they differ, if known."""

    figure: str
    method: str
    workers: int
    setting: str
    metric: str
    published: float
    simulated: float
    unit: str
    remark: str


@dataclass(frozen=True)
class SweepPoint:
    """Fig. 9 at one micro-batch size: step and total All2All in ms, exposed All2All in percent of the step's own total
    and of the undivided batch's."""

    micro_batch: int
    step_ms: float
    exposed_ms: float
    total_ms: float
    exposed_pct: float
    exposed_of_whole_pct: float


def micro_batch_sweep(
    profile: Profile,
    method: Method,
    workers: int,
    clustering: bool = True,
    micro_batch_ms: float | None = None,
    sizes: Sequence[int] = (512, 256, 128, 64, 32, 16),
) -> list[SweepPoint]:
    """Step and communication by micro-batch size. ``micro_batch_ms``: fixed dense cost of each (None: the profile's).

    Without clustering, keys repeat between micro-batches as measured on ``kuairand27k``.
    """
    if profile.reference is None:
        raise ValueError(f"hardware '{profile.name}' was not fitted to published times")
    workload = profile.workload if clustering else unclustered(profile.workload)
    reference = profile.reference
    if micro_batch_ms is not None:
        reference = replace(reference, micro_batch_ms=micro_batch_ms)
    hardware = reference_hardware(profile.name, reference, profile.workload)
    whole = 0.0
    points = []
    for size in sizes:
        n = workload.batch_size // size
        times = steady_account(method, n, [stage_seconds(Cluster(hardware, workers), workload, n)])
        step, exposed, total = (float(times[k][0]) for k in ("step", "exposed_communication", "communication"))
        whole = whole or total
        points.append(SweepPoint(size, step, exposed, total, exposed / total * 100, exposed / whole * 100))
    return points


_REMARKS = {
    ("comm_share", 128): "9.2 % of the tables' 2562 ms is 236 ms: All2All of few workers is the least certain time",
    (
        "lookup_share",
        128,
    ): "not explained: 24.4 % of the tables' 2562 ms is 625 ms, TorchRec minus UniEmb gives 593",
    (
        "exposed_ratio",
        "clustering=off",
    ): "not explained: duplication grows the total, but 2 of 64 All2Alls are exposed",
    ("exposed_comm", "clustering=on"): "not explained: less than 1/32 of the total; first and last may be smaller",
    ("exposed_comm", "sequence_length"): "not explained: twice the items would be nearly twice the keys; the reference "
    "length is not published",
    ("total_comm", "clustering=off"): "duplication was measured on other data than the paper's",
}


def note_points(rows: Sequence[PublishedNumber], methods: Mapping[str, Method]) -> list[NotePoint]:
    """Every published note that the simulator has a number for. ``methods`` by paper name."""
    profiles = {"NPU": load_profile(NPU), "GPU": load_profile(GPU)}
    points = []
    for row in rows:
        if row.mark != "N" or row.method not in methods or row.metric.startswith(("metric", "max_")):
            continue
        simulated = _simulated(row, profiles[row.cluster], methods)
        place = (row.where, row.method, row.workers, row.setting, row.metric)
        points.append(NotePoint(*place, row.value, simulated, row.unit, _remark(row)))
    return points


def _remark(row: PublishedNumber) -> str:
    for (metric, key), text in _REMARKS.items():
        if metric == row.metric and (key == row.workers or (isinstance(key, str) and key in row.setting)):
            return text
    return ""


def _simulated(row: PublishedNumber, profile: Profile, methods: Mapping[str, Method]) -> float:
    setting = dict(pair.split("=") for pair in row.setting.split())
    workload = resized(profile.workload, sequence_length=int(setting.get("sequence_length", 0)) or None)
    n = workload.batch_size // int(setting.get("micro_batch", 64))
    if setting.get("clustering") == "off":
        workload = unclustered(workload)

    def times(name: str) -> dict[str, float]:
        method = methods[name]
        cluster = cluster_of(method, profile.hardware, row.workers, profile.groups)
        stages = stage_seconds(cluster, workload, method.micro_batches_of(n))
        return {key: float(ms[0]) for key, ms in steady_account(method, n, [stages]).items()}

    mine = times(row.method)
    exposed = mine["exposed_communication"]
    if row.metric == "speedup":
        return times("TorchRec")["step"] / mine["step"]
    if row.metric == "lookup_reduction":
        return (1 - (mine["exposed_lookup"] + mine["update"]) / times("TorchRec")["exposed_lookup"]) * 100
    return {
        "lookup_share": mine["exposed_lookup"] / mine["step"] * 100,
        "comm_share": exposed / mine["step"] * 100,
        "utilisation": mine["dense"] / mine["step"] * 100,
        "utilisation_at_least": mine["dense"] / mine["step"] * 100,
        "total_comm": mine["communication"],
        "exposed_comm": exposed,
        "exposed_ratio": exposed / mine["communication"] * 100,
    }[row.metric]
