"""Grid files: TOML that says what to sweep and where to run it. See ``slurm/grids/`` and ``slurm/README.md``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nestpipe.config import ConfigError
from nestpipe.methods import MethodOptions, UnknownMethod, find_method, methods_of, require_equal_groups
from slurm.conditions import holds
from slurm.point import AXES, AXIS_DEFAULTS, DEFAULTS, Point, expected
from slurm.toml_lines import GridError, Source, read_source

GRIDS = Path(__file__).parent / "grids"


@dataclass(frozen=True)
class JobCluster:
    """Where points run and how jobs are requested. Names and text go to sbatch unchanged."""

    tasks_per_node: int = 8
    """Workers per node; points with fewer workers use part of one node."""
    max_workers: int = 0
    """Points with more workers are simulated instead of run (0: no limit)."""
    hardware: str = "h100-ib"
    """The simulator's profile: it predicts node hours, and simulates points larger than the cluster."""
    start_s: float = 60.0
    """Seconds that a job needs before its first step, for the prediction."""
    time: int = 60
    """Time limit of a job in minutes."""
    partition: str = ""
    account: str = ""
    constraint: str = ""
    qos: str = ""
    gpus_per_node: int = 0
    cpus_per_task: int = 0
    mem_gb: int = 0
    setup: tuple[str, ...] = ()
    """Shell lines before the ranks start: modules to load, variables to set."""
    parallelism: int = 16
    """Jobs of an array that run at the same time."""
    signal_delay_s: int = 90
    """Seconds before the time limit at which all ranks are told to save."""
    max_timeouts: int = 3
    """How often a job may reach its time limit and be requeued before it gives up."""
    checkpoint_every: int = 0
    """Steps between periodic checkpoints (0: only when told to)."""


@dataclass(frozen=True)
class Grid:
    """``points``: all different, in the order of the file."""

    name: str
    path: Path
    cluster: JobCluster
    points: tuple[Point, ...]


def find_grid(name: str) -> Path:
    """The file of a grid of this project by its name, or any other file. Raises GridError with the known names."""
    if (shipped := GRIDS / f"{name}.toml").is_file():
        return shipped
    if not Path(name).is_file():
        known = ", ".join(sorted(p.stem for p in GRIDS.glob("*.toml")))
        raise GridError(f"no grid '{name}': one of {known}, or a .toml file")
    return Path(name)


def load_grid(path: Path, changes: Mapping[str, Any] | None = None) -> Grid:
    """Read a grid; ``changes`` override what its [cluster] says. Raises GridError with file and line."""
    source = read_source(path)
    for table in source.tables:
        if table not in ("base", "sweep", "cluster"):
            raise source.error(f"unknown table [{table}]; known: [base], [[sweep]], [cluster]", table, 0, table)
    sweeps = source.tables.get("sweep")
    if not isinstance(sweeps, list) or not sweeps:
        raise source.error("a grid needs at least one [[sweep]]", "sweep")
    cluster = _cluster(source, changes or {})
    base = _base(source)
    points: dict[str, Point] = {}
    for index, sweep in enumerate(sweeps):
        for point in _points(source, index, sweep, base, cluster):
            points.setdefault(point.hash, point)
    return Grid(path.stem, path, cluster, tuple(points.values()))


def _cluster(source: Source, changes: Mapping[str, Any]) -> JobCluster:
    table = source.tables.get("cluster", {})
    kinds = {f.name: f.default for f in fields(JobCluster)}
    source.check_keys("cluster", 0, table, kinds)
    for key, value in table.items():
        default = kinds[key]
        if isinstance(default, tuple):
            good, what = isinstance(value, list) and all(isinstance(x, str) for x in value), "a list of shell lines"
        elif isinstance(default, str):
            good, what = isinstance(value, str), "text in quotes"
        else:
            number = isinstance(value, int | float if isinstance(default, float) else int)
            good, what = number and not isinstance(value, bool) and value >= 0, "a number of at least 0"
        if not good:
            raise source.error(f"{key} = {value!r} in [cluster] must be {what}", "cluster", 0, key)
    said = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    cluster = replace(JobCluster(), **{**said, **{k: v for k, v in changes.items() if v is not None}})
    for key in ("tasks_per_node", "time", "parallelism"):
        if getattr(cluster, key) < 1:
            raise source.error(f"{key} is {getattr(cluster, key)}; it must be at least 1", "cluster", 0, key)
    for key in sorted(k for k, v in changes.items() if isinstance(v, int) and v < 0):
        raise GridError(f"--{key.replace('_', '-')} is {changes[key]}; it must be at least 0")
    if cluster.signal_delay_s >= cluster.time * 60:
        text = f"signal_delay_s of {cluster.signal_delay_s} leaves no time in {cluster.time} min; make it shorter"
        raise source.error(text, "cluster", 0, "signal_delay_s")
    return cluster


def _base(source: Source) -> dict[str, Any]:
    table = source.tables.get("base", {})
    source.check_keys("base", 0, table, [*AXES, *(k for k in DEFAULTS if k not in AXES)])
    for key, value in table.items():
        if wrong := expected(key, value):
            raise source.error(f"{key} = {value!r} in [base] must be {wrong}", "base", 0, key)
    return {**DEFAULTS, **AXIS_DEFAULTS, **table}


def _points(
    source: Source, index: int, sweep: Mapping[str, Any], base: Mapping[str, Any], cluster: JobCluster
) -> Iterator[Point]:
    settings = [key for key in DEFAULTS if key not in AXES]
    source.check_keys("sweep", index, sweep, [*AXES, "where", "name", *settings])
    axes = {key: value for key, value in sweep.items() if key not in ("where", "name")}
    for key, value in axes.items():
        values = value if isinstance(value, list) else [value]
        if not values:
            raise source.error(f"{key} has no value", "sweep", index, key)
        for one in values:
            if wrong := expected(key, one):
                raise source.error(f"{key}: {one!r} must be {wrong}", "sweep", index, key)
        axes[key] = values
    conditions = sweep.get("where", [])
    if not isinstance(conditions, list) or not all(isinstance(c, str) for c in conditions):
        raise source.error("where must be a list of conditions in quotes", "sweep", index, "where")
    for chosen in itertools.product(*axes.values()):
        setting = {**base, **dict(zip(axes, chosen, strict=True))}
        try:
            kept = all([holds(condition, setting) for condition in conditions])
        except ValueError as error:
            raise source.error(f"where: {error}", "sweep", index, "where") from None
        if kept:
            yield _point(source, index, sweep, setting, cluster)


def _point(
    source: Source, index: int, sweep: Mapping[str, Any], values: Mapping[str, Any], cluster: JobCluster
) -> Point:
    def impossible(key: str, text: str) -> GridError:
        place = ("sweep", index, key) if key in sweep else ("base", 0, key)
        if place not in source.lines:
            place = ("sweep", index, "")
        return source.error(f"{text}; change it, or exclude the point with a condition in where", *place)

    def named_in(text: str) -> str:
        """The key that ``text`` is about: one that the file sets, if it names several."""
        named = [word for word in re.findall(r"\w+", text) if word in values]
        written = [key for key in named if key in sweep or ("base", 0, key) in source.lines]
        return (written or named or ["method"])[0]

    workers, tasks = values["workers"], cluster.tasks_per_node
    simulated = 0 < cluster.max_workers < workers
    if not simulated and workers > tasks and workers % tasks:
        raise impossible("workers", f"{workers} workers do not fill nodes of {tasks} tasks")
    batch, micro = values["batch_size"], values["micro_batch"]
    if micro is not None and (micro < 1 or batch % micro):
        raise impossible("micro_batch", f"micro_batch {micro} does not divide the batch of {batch}")
    count = min(8, batch) if micro is None else batch // micro
    name = values["method"].strip()
    changed = {key: values[key] for key in DEFAULTS if values[key] != DEFAULTS[key]}
    hardware = cluster.hardware if simulated else ""
    try:
        method = find_method(name)
        point = Point(name, workers, method.micro_batches_of(count), values["seed"], changed, simulated, hardware)
        if simulated and method.why_not_priced:
            text = f"{workers} workers are more than the cluster has, and {name} cannot be simulated"
            raise impossible("workers", f"{text}: {method.why_not_priced}")
        config = point.run_config(timeout_s=1.0)
        if simulated:
            require_equal_groups(method.with_options(MethodOptions(config.replica_groups)), workers)
        else:
            methods_of(config)
    except UnknownMethod as error:
        raise impossible("method", str(error)) from None
    except ConfigError as error:
        text = error.in_file()
        raise impossible(named_in(text), text) from None
    return point


def shape(point: Point, cluster: JobCluster) -> tuple[int, int]:
    """Nodes and tasks per node of a point's job."""
    tasks = min(point.workers, cluster.tasks_per_node)
    return -(-point.workers // tasks), tasks


def by_shape(points: Sequence[Point], cluster: JobCluster) -> dict[tuple[int, int], list[Point]]:
    """Points grouped by job shape: an array has one shape."""
    shapes: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        shapes.setdefault(shape(point, cluster), []).append(point)
    return shapes
