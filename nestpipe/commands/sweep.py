"""``nestpipe sweep preview|submit|status|resume|cancel|collect``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nestpipe.commands.terminal import wide_console

if TYPE_CHECKING:
    from slurm.folder import SweepFolder
    from slurm.grid import Grid
    from slurm.status import PointState

SweepName = Annotated[str, tyro.conf.Positional]


@dataclass(frozen=True)
class ClusterOptions:
    """Each option replaces the setting in the grid's [cluster]."""

    partition: str | None = None
    """sbatch's --partition."""
    account: str | None = None
    """sbatch's --account."""
    constraint: str | None = None
    """sbatch's --constraint."""
    time: int | None = None
    """Time limit of a job in minutes."""
    gpus_per_node: int | None = None
    """GPUs to ask for on each node."""
    tasks_per_node: int | None = None
    """Workers on each node."""
    setup: tuple[str, ...] | None = None
    """Shell lines to run before the ranks start, each in quotes."""
    parallelism: int | None = None
    """Jobs of an array that run at the same time."""
    max_workers: int | None = None
    """Points with more workers are simulated instead of run."""
    hardware: str | None = None
    """The simulator's hardware profile, for node hours and for points that are simulated."""
    max_timeouts: int | None = None
    """How often a job may reach its time limit before it gives up."""
    checkpoint_every: int | None = None
    """Steps between periodic checkpoints."""

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Preview:
    """Show what would be submitted: points, predicted node hours, and the text for sbatch. Needs no Slurm."""

    grid: SweepName
    """smoke, paper, or a .toml file."""
    cluster: ClusterOptions = field(default_factory=ClusterOptions)


@dataclass(frozen=True)
class Submit:
    """Submit the points of a grid that were not submitted before."""

    grid: SweepName
    """smoke, paper, or a .toml file."""
    executor: Literal["local", "slurm", "debug"] = "local"
    """local: on this machine, no Slurm needed; slurm: job arrays; debug: one by one, errors in this process."""
    folder: Path | None = None
    """The sweep's folder (default: sweeps/GRID); on a cluster, one that all nodes see."""
    cluster: ClusterOptions = field(default_factory=ClusterOptions)


@dataclass(frozen=True)
class Status:
    """Show the state of each point."""

    sweep: SweepName
    """The grid, or the sweep's folder."""
    folder: Path | None = None
    """The sweep's folder (default: sweeps/GRID)."""
    watch: bool = False
    """Keep the table up to date until nothing runs or waits."""


@dataclass(frozen=True)
class Resume:
    """Submit points again that are missing, failed, cancelled or lost; those that run or are done are not touched."""

    sweep: SweepName
    """The grid, or the sweep's folder."""
    folder: Path | None = None
    """The sweep's folder (default: sweeps/GRID)."""
    cluster: ClusterOptions = field(default_factory=ClusterOptions)


@dataclass(frozen=True)
class Cancel:
    """Cancel all jobs of a sweep; `resume` submits them again."""

    sweep: SweepName
    """The grid, or the sweep's folder."""
    folder: Path | None = None
    """The sweep's folder (default: sweeps/GRID)."""


@dataclass(frozen=True)
class Collect:
    """Copy the results into the record store, for tables and figures. It is safe to repeat at any time."""

    sweep: SweepName
    """The grid, or the sweep's folder."""
    folder: Path | None = None
    """The sweep's folder (default: sweeps/GRID)."""
    store: Path | None = None
    """The record store's folder (default: results/out/records/GRID)."""


Command = (
    Annotated[Preview, tyro.conf.subcommand("preview")]
    | Annotated[Submit, tyro.conf.subcommand("submit")]
    | Annotated[Status, tyro.conf.subcommand("status")]
    | Annotated[Resume, tyro.conf.subcommand("resume")]
    | Annotated[Cancel, tyro.conf.subcommand("cancel")]
    | Annotated[Collect, tyro.conf.subcommand("collect")]
)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 1 if points of the sweep have failed or results are broken."""
    command = tyro.cli(Command, prog="nestpipe sweep", args=arguments, config=(tyro.conf.OmitArgPrefixes,))
    out = wide_console(100)
    if isinstance(command, Preview):
        return _preview(command, out)
    if isinstance(command, Submit | Resume):
        return _start(command, out)
    sweep = _folder(command.sweep, command.folder)
    if isinstance(command, Status):
        return _status(sweep, command.watch, out)
    if isinstance(command, Cancel):
        from slurm.sweep import cancel

        print(f"cancelled {len(cancel(sweep))} jobs; to resume: nestpipe sweep resume {command.sweep}")
        return 0
    from slurm.collect import collect
    from slurm.status import counts, point_states

    name, _, _ = sweep.settings()
    store = command.store or Path("results/out/records") / name
    done = collect(sweep, store)
    print(f"{done.new} new records and {done.same} known ones in {store}; {counts(point_states(sweep))}")
    for line in done.bad:
        print(f"skipped: {line}")
    for line in done.diverged:
        print(line)
    return 1 if done.bad else 0


def _folder(name: str, folder: Path | None) -> SweepFolder:
    """``folder``, or ``name`` if it is a sweep's folder, or sweeps/NAME."""
    from slurm.folder import SweepFolder

    if folder is None:
        folder = Path(name) if (Path(name) / "sweep.json").is_file() else Path("sweeps") / Path(name).stem
    return SweepFolder(folder)


def _preview(command: Preview, out: Console) -> int:
    from slurm.grid import by_shape, find_grid, load_grid
    from slurm.node_hours import predict
    from slurm.sbatch import sbatch_text

    grid = load_grid(find_grid(command.grid), command.cluster.given())
    predictions = predict(grid.points, grid.cluster)
    table = Table(
        title=f"{grid.name}: {len(grid.points)} points",
        caption=f"step and node hours PREDICTED by the simulator for {grid.cluster.hardware}",
        box=box.SIMPLE_HEAD,
    )
    for head in ("point", "", "nodes x tasks", "step ms", "node hours"):
        table.add_column(head, justify="left" if head in ("point", "") else "right")
    shapes = by_shape([p for p in grid.points if not p.simulated], grid.cluster)
    of_point = {p.hash: shape for shape, points in shapes.items() for p in points}
    for point in grid.points:
        seen = predictions[point.hash]
        where = "{} x {}".format(*of_point[point.hash]) if point.hash in of_point else "simulated"
        hours = f"{seen.node_hours:.2f}" if point.hash in of_point else ""
        table.add_row(point.hash, point.title, where, f"{seen.step_ms:.1f}", hours)
    out.print(table)
    for (nodes, tasks), points in shapes.items():
        out.print(f"sbatch for {len(points)} points of {nodes} x {tasks}:", style="bold")
        logs = (Path("sweeps") / grid.name / "logs").absolute()
        print(sbatch_text(grid.cluster, nodes, tasks, grid.name, len(points), logs))
    real = sum(map(len, shapes.values()))
    total = sum(seen.node_hours for seen in predictions.values())
    print(
        f"{len(grid.points)} points: {real} jobs in {len(shapes)} arrays, {total:.1f} node hours; "
        f"{len(grid.points) - real} simulated. Nothing was submitted."
    )
    return 0


def _start(command: Submit | Resume, out: Console) -> int:
    from slurm.sweep import resume, submit

    if isinstance(command, Submit):
        grid = _load(command)
        sweep = _folder(grid.name, command.folder)
    else:
        sweep = _folder(command.sweep, command.folder)
    shown = time.monotonic()
    with Live(console=out, transient=True, auto_refresh=False) as live:

        def watch() -> None:
            nonlocal shown
            if time.monotonic() - shown >= 1:
                shown = time.monotonic()
                live.update(_table(sweep), refresh=out.is_terminal)

        if isinstance(command, Submit):
            done = submit(sweep, grid, command.executor, watch)
        else:
            done = resume(sweep, command.cluster.given(), watch)
    kept = f"{done.before} were here before" if isinstance(command, Submit) else f"{done.before} left alone"
    print(f"{done.new} points submitted, {done.simulated} simulated, {kept}; folder {sweep.path}")
    if done.jobs:
        arrays = sorted({job.split("_")[0] for job in done.jobs}, key=int)
        print(f"jobs {', '.join(arrays)}; watch them: nestpipe sweep status {sweep.path} --watch")
        return 0
    return _status(sweep, False, out)


def _load(command: Submit) -> Grid:
    from slurm.grid import find_grid, load_grid

    return load_grid(find_grid(command.grid), command.cluster.given())


def _status(sweep: SweepFolder, watch: bool, out: Console) -> int:
    from slurm.status import ALIVE, counts, point_states

    sweep.settings()
    states = point_states(sweep)
    if watch:
        with Live(_table(sweep), console=out, transient=True, auto_refresh=False) as live:
            while any(s.state in ALIVE for s in states):
                live.update(_as_table(states), refresh=True)
                time.sleep(2)
                states = point_states(sweep)
    out.print(_as_table(states))
    bad = [s for s in states if s.state in ("failed", "gave up", "lost")]
    for state in bad:
        out.print(Text(f"{state.folder.path.name} {state.title} (job {state.job}): {state.detail}", style="red"))
        for line in state.stderr:
            out.print(Text(f"    {line}"), soft_wrap=True)
    print(counts(states))
    return 1 if bad else 0


def _table(sweep: SweepFolder) -> Table:
    from slurm.status import point_states

    return _as_table(point_states(sweep))


_STYLES = {"done": "green", "running": "cyan", "failed": "red", "lost": "red", "gave up": "red"}


def _as_table(states: Sequence[PointState]) -> Table:
    from slurm.status import counts

    table = Table(title=counts(states), box=box.SIMPLE_HEAD)
    for head in ("point", "", "state", "job", ""):
        table.add_column(head)
    for s in states:
        style = _STYLES.get(s.state, "")
        table.add_row(s.folder.path.name, s.title, Text(s.state, style=style), s.job, Text(s.detail))
    return table
