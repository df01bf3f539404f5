"""What a checkpoint's manifest says, which checkpoint is the newest, and whether a run may continue from it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nestpipe.measurement.provenance import provenance

FORMAT = "nestpipe-checkpoint-1"

#: Maps (step, ranks) of a checkpoint to the step of the present ranks that starts at the same sample, or None.
SameSample = Callable[[int, int], int | None]


class CheckpointError(ValueError):
    """The checkpoint cannot be resumed or cannot be written; the message says in one line why and what to do."""


@dataclass(frozen=True)
class Manifest:
    """``files``: SHA-256 by file name, in rank order. ``settings``: the settings that decide what is learned.

    ``number``: counts the saves of the run, from 1. ``origin``: the commit and the versions that saved it, by name.
    """

    path: Path
    method: str
    step: int
    ranks: int
    settings: Mapping[str, Any]
    files: Mapping[str, str]
    number: int = 0
    origin: Mapping[str, str | None] = field(default_factory=dict)

    def require(self, settings: Mapping[str, Any]) -> None:
        """Raises CheckpointError if one of ``settings`` differs here, and names the first that does."""
        for name, value in settings.items():
            there = self.settings.get(name)
            if there != value:
                if isinstance(value, dict) and isinstance(there, dict):  # a group of options: name the one
                    name = next(inner for inner in {**value, **there} if value.get(inner) != there.get(inner))
                    there, value = there.get(name), value.get(name)
                raise CheckpointError(
                    f"{self.path} is from another run: {name} was {there!r} there and is {value!r} now"
                )


def origin() -> dict[str, str | None]:
    """The commit that runs, and the versions on which the bits depend."""
    found = provenance()
    return {"commit": found["commit"]} | {name: found["versions"].get(name) for name in ("nestpipe", "torch")}


#: In the file, the settings are called ``identity``.
_MANIFEST_KINDS = {"method": str, "step": int, "ranks": int, "identity": dict, "files": dict}


_OPTIONAL = {"number": int, "origin": dict}


def newest(folder: Path) -> Manifest | None:
    """The checkpoint that was saved last in a method's folder. Raises CheckpointError for a manifest that cannot be
    read."""
    return max((read_manifest(path) for path in saved_in(folder)), key=lambda m: (m.number, m.step), default=None)


def require_unused(folder: Path) -> None:
    """Raises CheckpointError if another run has saved to a method's folder: a fresh run must not mix with it."""
    if found := saved_in(folder):
        raise CheckpointError(
            f"{folder} holds checkpoints of an earlier run (the last is {found[-1].name}): "
            "continue that run with --resume, choose another --checkpoint folder, or move this one away"
        )


def saved_in(folder: Path) -> list[Path]:
    """The whole checkpoints in a method's folder, by name."""
    return sorted(p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}(-\d+)?", p.name))


def read_manifest(path: Path) -> Manifest:
    try:
        data = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, not {FORMAT!r}")
        kinds = {**_MANIFEST_KINDS, **{name: kind for name, kind in _OPTIONAL.items() if name in data}}
        fields = {name: data[name] for name in kinds}
        if wrong := [name for name, kind in kinds.items() if type(fields[name]) is not kind]:
            raise ValueError(f"its {wrong[0]} is {fields[wrong[0]]!r}")
        if list(fields["files"]) != [f"rank-{rank}.pt" for rank in range(fields["ranks"])]:
            raise ValueError(f"it does not list one file for each of its {fields['ranks']} ranks")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}/manifest.json cannot be used ({error}): remove {path.name} to resume") from error
    return Manifest(path, settings=fields.pop("identity"), **fields)


def method_folder(folder: str | Path, method: str) -> Path:
    return Path(folder) / re.sub(r"[^A-Za-z0-9_+.-]+", "_", method)


def other_origin(manifest: Manifest) -> str:
    """A sentence if another commit or version saved the checkpoint than the one that runs now, else an empty one."""
    now = origin()
    changed = [name for name, value in now.items() if manifest.origin and manifest.origin.get(name) != value]
    texts = [f"{name} {manifest.origin.get(name) or 'unknown'} (now {now[name] or 'unknown'})" for name in changed]
    return f"{manifest.method} resumed {manifest.path.name}, which was saved by {', '.join(texts)}" if texts else ""


def require_resumable(
    manifest: Manifest, ranks: int, same_sample: SameSample, reshards: bool, steps: int | None = None
) -> int:
    """The step at which ``ranks`` ranks resume a checkpoint, perhaps one of another number of ranks.

    Raises CheckpointError if they cannot, or if the run is to end before that, after ``steps``. ``reshards``: whether
    the method can be resumed on other ranks at all.
    """
    step = manifest.step
    if manifest.ranks != ranks:
        step = _step_of_other_ranks(manifest, ranks, same_sample, reshards)
    if steps is not None and step > steps:
        text = f"cannot resume {manifest.path}: it is at step {step}, but this run would end after {steps} steps, "
        raise CheckpointError(text + "warm-up included; ask for more with --steps or --epochs")
    return step


def _step_of_other_ranks(manifest: Manifest, ranks: int, same_sample: SameSample, reshards: bool) -> int:
    there = f"cannot resume {manifest.path} ({manifest.ranks} ranks) with {ranks} ranks:"
    if not reshards:
        raise CheckpointError(f"{there} {manifest.method}'s shards only fit their own number of ranks")
    step = same_sample(manifest.step, manifest.ranks)
    if step is None:
        raise CheckpointError(f"{there} its {manifest.step} steps end inside a step of {ranks} ranks")
    return step
