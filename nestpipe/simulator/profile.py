"""A profile: a cluster's hardware and its usual workload, from one TOML file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from nestpipe.simulator.hardware import Hardware, ProfileError, hardware_from_table
from nestpipe.simulator.key_statistics import load_statistics
from nestpipe.simulator.reference import Reference, reference_from_table, reference_hardware
from nestpipe.simulator.workload import KeyStatistics, Workload, WorkloadError

#: 2D-SP's replica groups unless a profile's published times say otherwise.
GROUPS = 4


@dataclass(frozen=True)
class Profile:
    """``reference``: published times that ``hardware`` was derived from (None: specification or measurement).

    ``workers``: usual numbers of workers; ``groups``: 2D-SP's replica groups.
    """

    name: str
    hardware: Hardware
    workload: Workload
    workers: tuple[int, ...]
    groups: int
    reference: Reference | None


def load_profile(name: str) -> Profile:
    """A shipped profile by name, or a TOML file. Raises ProfileError with a message of one line."""
    tables = load_profile_text(name)
    unknown = set(tables) - {"profile", "reference", "hardware", "workload"}
    if unknown:
        raise ProfileError(f"hardware '{name}': unknown table [{sorted(unknown)[0]}]")
    if ("reference" in tables) == ("hardware" in tables):
        raise ProfileError(f"hardware '{name}': needs either [hardware] or [reference]")
    about = tables.get("profile", {})
    notes = tuple(about.get("notes", ()))
    workload = workload_from_table(name, tables.get("workload", {}))
    workers = tuple(about.get("workers", (1, 2, 4, 8)))
    if "reference" not in tables:
        hardware = replace(hardware_from_table(name, tables["hardware"]), notes=notes)
        return Profile(name, hardware, workload, workers, GROUPS, None)
    reference = reference_from_table(name, tables["reference"])
    hardware = reference_hardware(name, reference, workload, notes)
    return Profile(name, hardware, workload, workers, reference.groups, reference)


def workload_from_table(name: str, table: Mapping[str, Any]) -> Workload:
    """``[workload]``: fields of ``Workload``; ``keys`` names measured statistics, or only ``keys_per_sample``."""
    values = dict(table)
    try:
        if "keys" in values:
            keys = load_statistics(values.pop("keys"))
        else:
            positions = values.get("sequence_length", Workload.sequence_length) + values.get("negatives", 64)
            keys = KeyStatistics(float(values.pop("keys_per_sample", positions)))
        known = {f.name for f in fields(Workload)}
        for key, value in values.items():
            if key not in known or not isinstance(value, int) or isinstance(value, bool):
                raise ProfileError(f"hardware '{name}': [workload] {key} = {value!r}: unknown, or not a whole number")
        return Workload(keys=keys, **values)
    except WorkloadError as error:
        raise ProfileError(f"hardware '{name}': {error}") from error


def resized(
    workload: Workload,
    embedding_dim: int | None = None,
    dense_layers: int | None = None,
    sequence_length: int | None = None,
    batch_size: int | None = None,
) -> Workload:
    """Another model on the same data.

    Keys per sample follow the sequence length: histories are assumed to be longer than any window. Distinct keys of a
    batch follow the power law that the router's measurement shows over workers.
    """
    keys, length = workload.keys, sequence_length or workload.sequence_length
    for name, value in (("sequence length", length), ("batch size", batch_size or workload.batch_size)):
        if value < 1:
            raise WorkloadError(f"{name} is {value}; it must be at least 1")
    per_sample = keys.keys_per_sample * (length + workload.negatives) / (workload.sequence_length + workload.negatives)
    more = per_sample / keys.keys_per_sample * (batch_size or workload.batch_size) / workload.batch_size
    share = min(1.0, keys.distinct_share * more ** (keys.rows_exponent - 1))
    return replace(
        workload,
        keys=replace(keys, keys_per_sample=per_sample, distinct_share=share),
        embedding_dim=workload.embedding_dim if embedding_dim is None else embedding_dim,
        dense_layers=workload.dense_layers if dense_layers is None else dense_layers,
        sequence_length=length,
        batch_size=batch_size or workload.batch_size,
    )


def local_profile() -> Path:
    """The file in which ``nestpipe calibrate`` saves this machine's profile, known as ``local``."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "nestpipe" / "local.toml"


def known_profiles() -> list[str]:
    """Names of the profiles that ship with the package."""
    folder = files("nestpipe.simulator") / "profiles"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load_profile_text(name_or_path: str) -> dict[str, Any]:
    """The TOML tables of a shipped profile or a file. Raises ProfileError, listing the known ones."""
    path = Path(name_or_path)
    try:
        if name_or_path in known_profiles():
            text = (files("nestpipe.simulator") / "profiles" / f"{name_or_path}.toml").read_text(encoding="utf-8")
        elif name_or_path == "local":
            if not local_profile().is_file():
                raise ProfileError("hardware 'local' has not been measured: run 'nestpipe calibrate' first")
            text = local_profile().read_text(encoding="utf-8")
        elif path.suffix == ".toml" and path.is_file():
            text = path.read_text(encoding="utf-8")
        elif path.suffix == ".toml":
            raise ProfileError(f"hardware '{name_or_path}': no such file")
        else:
            known = ", ".join(known_profiles())
            raise ProfileError(f"unknown hardware '{name_or_path}': choose one of {known}, local, or a .toml file")
        return tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"hardware '{name_or_path}': cannot be read as TOML ({error})") from error
