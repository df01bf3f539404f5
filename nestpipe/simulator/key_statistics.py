"""Measured key statistics that ship with the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

from nestpipe.simulator.workload import KeyStatistics, Workload, WorkloadError


def known_statistics() -> list[str]:
    folder = files("nestpipe.simulator") / "workloads"
    return sorted(p.name.removesuffix(".json") for p in folder.iterdir() if p.name.endswith(".json"))


def load_statistics(name: str) -> KeyStatistics:
    """Measured statistics that ship with the package. Raises WorkloadError, listing the known ones."""
    if name not in known_statistics():
        raise WorkloadError(f"unknown key statistics '{name}': choose one of {', '.join(known_statistics())}")
    text = (files("nestpipe.simulator") / "workloads" / f"{name}.json").read_text(encoding="utf-8")
    return statistics_from_json(json.loads(text))


def unclustered(workload: Workload) -> Workload:
    """The same workload with the key repetition between micro-batches that the router measured without clustering."""
    return replace(workload, keys=replace(workload.keys, duplication=load_statistics("kuairand27k").duplication))


def statistics_from_json(data: Mapping[str, Any]) -> KeyStatistics:
    return KeyStatistics(**{**data, "duplication": {int(n): float(f) for n, f in data["duplication"].items()}})
