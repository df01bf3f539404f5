"""The cluster: rates and latencies of one worker and of what connects the workers. Profiles are TOML.

A rate may be ``inf`` if its cost is part of another one. The published tables, for example, give one
dense time that includes updates and the dense AllReduce.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from nestpipe.schedule.stages import STAGES


class ProfileError(ValueError):
    """A hardware profile cannot be used. The message says in one line which one, what is wrong and what to do."""


@dataclass(frozen=True)
class Hardware:
    """One worker and its links. Rates are per worker and direction; bytes, seconds, FLOP, rows, keys."""

    name: str
    origin: str
    """Where the numbers come from: ``published`` (fitted to them), ``specification`` or ``measured``."""
    flops_per_s: float
    """Dense forward and backward, as achieved by large micro-batches."""
    half_rate_samples: float = 0.0
    """Efficiency curve: a micro-batch of b samples runs at b / (b + this) of the rate."""
    forward_share: float = 1 / 3
    """Share of the dense time of a micro-batch that the forward takes."""
    expand_bytes_per_s: float = math.inf
    """Copying received rows into place, key by key, before the dense forward; summing gradients after the backward."""
    hbm_bytes_per_s: float = math.inf
    """Sparse update, dense optimizer and dual-buffer synchronisation."""
    hand_over_s: float = 0.0
    """Fixed time of handing prefetched rows over to training: the lookup that stays exposed in a pipeline."""
    host_bytes_per_s: float = math.inf
    """Random reads of whole rows from host memory."""
    host_row_s: float = 0.0
    """Fixed time of each random read."""
    write_bytes_per_s: float = math.inf
    """Random writes of whole rows to host memory."""
    routing_keys_per_s: float = math.inf
    """Deduplicating and bucketing keys."""
    pcie_bytes_per_s: float = math.inf
    """Host to device and back."""
    input_samples_per_s: float = math.inf
    """Reading and collating samples."""
    workers_per_node: int = 1
    intra_bytes_per_s: float = math.inf
    """Between workers of a node."""
    network_bytes_per_s: float = math.inf
    """Between nodes."""
    collective_latency_s: float = 0.0
    """Fixed time of a collective on two or more workers, whatever its size."""
    peer_latency_s: float = 0.0
    """All2All: additional time per peer."""
    allreduce_bytes_per_s: float = math.inf
    """AllReduce of dense gradients."""
    exchange_half_workers: float = math.inf
    """All2All: at this many workers, congestion has halved the bandwidth."""
    lookup_half_workers: float = math.inf
    """Key routing and retrieval: at this many workers, they take twice as long as on few workers."""
    lookup_tier_workers: float = math.inf
    """Beyond this many workers, lookups slow down abruptly."""
    lookup_tier_penalty: float = 0.0
    """They slow down by this many times the lookup on few workers."""
    replica_lookup: float = 1.0
    """2D-SP: time of its lookup relative to that of one group."""
    replica_sync: float = 1.0
    """2D-SP: time of replica synchronisation relative to an All2All of the batch without congestion."""
    overlap_cost: float = 0.0
    """Lanes share a worker's cores: every second hidden behind dense compute lengthens it by this many seconds."""
    one_link: bool = False
    """AllReduce and replica synchronisation share the All2All's link, so they queue behind each other."""
    stage_overhead: Mapping[str, float] = field(default_factory=dict)
    """Fixed seconds of an operation, by stage letter."""
    notes: tuple[str, ...] = ()
    """Sources and assumptions."""

    def __post_init__(self) -> None:
        positive = {f.name for f in fields(self) if f.name.endswith(("_per_s", "half_workers"))}
        for name in positive | {"lookup_tier_workers", "workers_per_node"}:
            if not getattr(self, name) > 0:
                raise ProfileError(f"hardware '{self.name}': {name} is {getattr(self, name)}; it must be above 0")
        for name in ("half_rate_samples", "overlap_cost", "lookup_tier_penalty", "replica_lookup", "replica_sync"):
            _not_negative(self.name, name, getattr(self, name))
        for name in (f.name for f in fields(self) if f.name.endswith("_s") and f.name not in positive):
            _not_negative(self.name, name, getattr(self, name))
        for stage, value in self.stage_overhead.items():
            if stage not in STAGES:
                raise ProfileError(
                    f"hardware '{self.name}': stage_overhead names stage '{stage}', which does not exist"
                )
            _not_negative(self.name, f"stage_overhead of {stage}", value)
        if not 0 < self.forward_share < 1:
            raise ProfileError(f"hardware '{self.name}': forward_share is {self.forward_share}; it must be inside 0..1")


def _not_negative(hardware: str, name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ProfileError(f"hardware '{hardware}': {name} is {value}; it must be a number of at least 0")


def hardware_from_table(name: str, table: Mapping[str, Any]) -> Hardware:
    """``[hardware]`` of a profile. Raises ProfileError naming a key that is unknown, missing or of a wrong type."""
    kinds = {f.name: f.type for f in fields(Hardware)}
    for key, value in table.items():
        if key not in kinds:
            raise ProfileError(f"hardware '{name}': unknown key '{key}'")
        if kinds[key] == "Mapping[str, float]" and not isinstance(value, dict):
            raise ProfileError(f"hardware '{name}': {key} must be a table of numbers, not {value!r}")
        if kinds[key] in ("float", "int") and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ProfileError(f"hardware '{name}': {key} must be a number, not {value!r}")
    if missing := [key for key in ("origin", "flops_per_s") if key not in table]:
        raise ProfileError(
            f"hardware '{name}': [hardware] lacks {' and '.join(missing)}; docs/simulator.md lists a profile's keys"
        )
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    try:
        return Hardware(**{"name": name, **values})
    except TypeError as error:
        raise ProfileError(f"hardware '{name}': {error}") from error


def hardware_to_toml(hardware: Hardware, workload: Mapping[str, Any] | None = None) -> str:
    """The text of a profile file; keys at their defaults are left out."""
    defaults: dict[str, Any] = {f.name: {} if f.name == "stage_overhead" else f.default for f in fields(Hardware)}
    lines = ["[hardware]"]
    for name, value in asdict(hardware).items():
        if name in ("name", "notes") or value == defaults[name]:
            continue
        lines.append(f"{name} = {_toml(value)}")
    lines = ["[profile]", f"notes = {_toml(hardware.notes)}", "", *lines]
    if workload:
        lines += ["", "[workload]", *(f"{name} = {_toml(value)}" for name, value in workload.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + " }"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)
