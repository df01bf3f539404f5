"""The methods that can be simulated: each a schedule, and whether it shards in replica groups. Nothing else differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nestpipe import schedule
from nestpipe.schedule.operations import Schedule
from nestpipe.schedule.text import load


class UnknownMethod(ValueError):
    """No method of that name; the message lists the known ones."""


@dataclass(frozen=True)
class SimulatedMethod:
    """``template``: micro-batches -> schedule. ``micro_batches``: fixed number, None where the caller chooses.

    ``grouped``: tables are replicated over groups of workers, exchanges stay inside a group.
    ``paper_method``: whose published numbers stand beside this one's.
    """

    name: str
    template: Callable[[int], Schedule]
    paper_method: str | None = None
    micro_batches: int | None = None
    grouped: bool = False

    def schedule(self, micro_batches: int) -> Schedule:
        return _template(self.template, self.micro_batches or micro_batches)


@lru_cache(maxsize=256)
def _template(make: Callable[[int], Schedule], micro_batches: int) -> Schedule:
    return make(micro_batches)


def _serial(_: int) -> Schedule:
    return schedule.serial()


def _dbp_only(_: int) -> Schedule:
    return schedule.dbp_only()


BUILT_IN: Mapping[str, SimulatedMethod] = {
    m.name: m
    for m in (
        SimulatedMethod("serial", _serial, "TorchRec", 1),
        SimulatedMethod("dbp-only", _dbp_only, "DBP-only", 1),
        SimulatedMethod("fwp-only", schedule.fwp_only, "FWP-only"),
        SimulatedMethod("nestpipe", schedule.nestpipe, "NestPipe"),
    )
}


def _from_file(path: str) -> SimulatedMethod:
    template = load(Path(path))
    return SimulatedMethod(template.name, lambda _: template, None, template.micro_batches)


def select(names: str, known: Mapping[str, SimulatedMethod]) -> list[SimulatedMethod]:
    """Methods by comma-separated name or file with a schedule in text form (``all``: every named one).

    Raises UnknownMethod, listing the known ones.
    """
    if names.strip() == "all":
        return list(known.values())
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    own = {name: _from_file(name) for name in chosen if name not in known and Path(name).is_file()}
    known = {**known, **own}
    for name in chosen:
        if name not in known:
            raise UnknownMethod(
                f"unknown method '{name}': one of {', '.join(known)}, or all; or one of your own, registered or a file"
            )
    if not chosen:
        raise UnknownMethod(f"no method named: one or more of {', '.join(known)}, or all")
    return [known[name] for name in dict.fromkeys(chosen)]
