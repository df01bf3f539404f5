"""A point of a grid: everything that determines one run, and the hash that names it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_args, get_type_hints

from nestpipe.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig

#: What a grid varies. ``micro_batch`` counts samples; a point keeps the number of micro-batches.
AXES = ("workers", "method", "embedding_dim", "dense_layers", "sequence_length", "micro_batch", "seed")
_GROUPS = {"data": DataConfig, "model": ModelConfig, "optimizer": OptimizerConfig}
#: Fields of ``RunConfig`` itself that a grid may set.
RUN_SETTINGS = ("steps", "rounds", "clustering", "pace_dense", "evaluate", "replica_groups", "sync_interval")
DEFAULTS: Mapping[str, Any] = {
    **{f.name: f.default for f in fields(RunConfig) if f.name in RUN_SETTINGS},
    "rounds": 1,  # one method per job: nothing to interleave
    **{f.name: f.default for group in _GROUPS.values() for f in fields(group) if f.default is not MISSING},
}
#: Axes that are not settings of the run, with the value that they have if a grid does not set them.
AXIS_DEFAULTS: Mapping[str, Any] = {"workers": 2, "method": "nestpipe", "micro_batch": None, "seed": 1}
_HINTS = {name: hint for group in _GROUPS.values() for name, hint in get_type_hints(group).items()}


def expected(name: str, value: Any) -> str:
    """What ``name`` must be, "" if ``value`` is valid."""
    default = DEFAULTS.get(name, AXIS_DEFAULTS.get(name))
    choices = get_args(_HINTS.get(name))
    if choices and type(None) not in choices:
        return "" if value in choices else f"one of {', '.join(map(repr, choices))}"
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, float):
        return "" if isinstance(value, int | float) and not isinstance(value, bool) else "a number"
    if isinstance(default, int) or name == "micro_batch":
        return "" if isinstance(value, int) and not isinstance(value, bool) else "a whole number"
    return "" if isinstance(value, str) else "text in quotes"


@dataclass(frozen=True)
class Point:
    """``settings``: fields of the run that differ from their defaults, so that new fields do not change old hashes.

    ``simulated``: whether it is too large for the cluster; ``hardware``: the profile to simulate it on, "" otherwise.
    """

    method: str
    workers: int
    micro_batches: int
    seed: int
    settings: Mapping[str, Any]
    simulated: bool = False
    hardware: str = ""

    @property
    def decisive(self) -> dict[str, Any]:
        """Everything that determines the run, as its folder stores it."""
        names = ("method", "workers", "micro_batches", "seed", "simulated", "hardware")
        return {**{name: getattr(self, name) for name in names}, "settings": dict(sorted(self.settings.items()))}

    @property
    def hash(self) -> str:
        """12 hex digits of everything that determines the run. The grid, its order and the executor do not count."""
        return hashlib.sha256(json.dumps(self.decisive, sort_keys=True).encode()).hexdigest()[:12]

    def __getitem__(self, name: str) -> Any:
        return self.settings.get(name, DEFAULTS[name])

    @property
    def title(self) -> str:
        """One line for people."""
        size = f"({self.micro_batches})" if self.micro_batches > 1 and "(" not in self.method else ""
        parts = [f"{self.method}{size}", f"{self.workers} workers", f"dim {self['embedding_dim']}"]
        parts += [f"{self['dense_layers']} layers", f"length {self['sequence_length']}", f"seed {self.seed}"]
        return " ".join(parts)

    def run_config(self, timeout_s: float, checkpoint: str | None = None, checkpoint_every: int = 0) -> RunConfig:
        """The configuration of ``nestpipe run`` for this point, which resumes from what it finds in ``checkpoint``.

        Raises ConfigError.
        """
        groups = {
            name: group(**{f.name: self[f.name] for f in fields(group) if f.name in DEFAULTS})
            for name, group in _GROUPS.items()
        }
        return RunConfig(
            methods=self.method,
            workers=self.workers,
            micro_batches=self.micro_batches,
            seed=self.seed,
            timeout=timeout_s,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every if checkpoint else 0,
            resume=checkpoint is not None,
            **{name: self[name] for name in RUN_SETTINGS},
            **groups,
        )


def point_from_json(data: Mapping[str, Any]) -> Point:
    """The point whose ``decisive`` is ``data``."""
    return Point(**{name: data[name] for name in (f.name for f in fields(Point)) if name in data})
