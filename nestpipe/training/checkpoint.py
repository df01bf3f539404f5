"""Checkpoints: a method's whole state after a step, saved on all ranks or not at all.

    DIR/METHOD/step-00000012/rank-0.pt ...   plain tensors and numbers (torch.save), read back with weights_only
    DIR/METHOD/step-00000012/manifest.json   written last: step, ranks, configuration, a SHA-256 of each file

A checkpoint is written under a temporary name and is renamed once every rank's file is on disk, so a folder with a
final name is complete. What a killed run left half-written still has its temporary name, and the next save removes it.
Batches in flight are not saved but read again: the loader's position follows from the step. All ranks of a job share
the file system.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from nestpipe.machine.files import write_atomically
from nestpipe.machine.locking import sole_writer
from nestpipe.ranks.agreement import outcomes
from nestpipe.trainer import Reshardable, StepResult, Trainer

FORMAT = "nestpipe-checkpoint-1"
KEEP = 2

#: Maps (step, ranks) of a checkpoint to the step of the present ranks that starts at the same sample, or None.
SameSample = Callable[[int, int], int | None]


class CheckpointError(ValueError):
    """The checkpoint cannot be resumed or cannot be written; the message says in one line why and what to do."""


@dataclass(frozen=True)
class Manifest:
    """``files``: SHA-256 by file name, in rank order. ``settings``: the settings that decide what is learned."""

    path: Path
    method: str
    step: int
    ranks: int
    settings: Mapping[str, Any]
    files: Mapping[str, str]

    def require(self, settings: Mapping[str, Any]) -> None:
        """Raises CheckpointError if one of ``settings`` differs here, and names the first that does."""
        for name, value in settings.items():
            if self.settings.get(name) != value:
                there = self.settings.get(name)
                raise CheckpointError(
                    f"{self.path} is from another run: {name} was {there!r} there and is {value!r} now"
                )


#: In the file, the settings are called ``identity``.
_MANIFEST_KINDS = {"method": str, "step": int, "ranks": int, "identity": dict, "files": dict}


def newest(folder: Path) -> Manifest | None:
    """The latest whole checkpoint in a method's folder. Raises CheckpointError for a manifest that cannot be read."""
    found = sorted((p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)), key=lambda p: p.name)
    if not found:
        return None
    path = found[-1]
    try:
        data = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, not {FORMAT!r}")
        fields = {name: data[name] for name in _MANIFEST_KINDS}
        if wrong := [name for name, kind in _MANIFEST_KINDS.items() if type(fields[name]) is not kind]:
            raise ValueError(f"its {wrong[0]} is {fields[wrong[0]]!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}/manifest.json cannot be used ({error}): remove {path.name} to resume") from error
    return Manifest(path, settings=fields.pop("identity"), **fields)


@contextlib.contextmanager
def only_writer(folder: str | None) -> Iterator[None]:
    """Within the block, no other run on this machine saves to ``folder``. Raises CheckpointError if one does."""
    if not folder:
        yield
        return
    busy = f"another run saves to {folder}; wait for it, or choose another folder"
    with sole_writer(Path(folder), busy=busy, option="--checkpoint", error=CheckpointError):
        yield


def method_folder(folder: str | Path, method: str) -> Path:
    return Path(folder) / re.sub(r"[^A-Za-z0-9_+.-]+", "_", method)


@dataclass(frozen=True)
class Checkpoints:
    """One method's checkpoints. ``save`` and ``load`` are collective over all ranks, between steps."""

    folder: Path
    method: str
    settings: Mapping[str, Any]

    def save(self, trainer: Trainer, results: Sequence[StepResult]) -> None:
        """Save the state between two steps, and the ``results`` so far.

        Raises CheckpointError on every rank if one of them cannot write.
        """
        step = trainer.trained
        place, rank = self.folder / f"step-{step:08d}", dist.get_rank()
        writing = self.folder / f".step-{step:08d}.writing"
        state = {
            "trainer": trainer.state_dict(),
            "results": [list(vars(result).values()) for result in results],
            "random": torch.get_rng_state(),
        }
        if _first_rank(lambda: place.exists()):
            return
        _first_rank(lambda: _make_empty(writing))
        digests = _each_rank(lambda: _write(writing / f"rank-{rank}.pt", state))
        _first_rank(lambda: self._complete(writing, place, step, digests))

    def _complete(self, writing: Path, place: Path, step: int, digests: Sequence[str]) -> None:
        manifest = {
            "format": FORMAT,
            "method": self.method,
            "step": step,
            "ranks": len(digests),
            "identity": self.settings,
            "files": {f"rank-{rank}.pt": digest for rank, digest in enumerate(digests)},
        }
        write_atomically(writing / "manifest.json", json.dumps(manifest, indent=1))
        _sync(writing)
        os.replace(writing, place)
        _sync(self.folder)
        for old in sorted(self.folder.glob("step-*"))[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    def load(self, trainer: Trainer, same_sample: SameSample) -> list[StepResult] | None:
        """Bring ``trainer`` to the newest checkpoint. Returns the results so far, or None if there is no checkpoint.

        Raises CheckpointError on every rank, before any has changed its state, for a file that does not match its
        checksum, another configuration, or a number of ranks that the method cannot resume with.
        """
        manifest: Manifest | None = _first_rank(lambda: newest(self.folder))
        if manifest is None:
            return None
        state = _each_rank(lambda: self._read(manifest, trainer, same_sample), share=False)
        trainer.load_state_dict(state["trainer"])
        torch.set_rng_state(state["random"])
        return [StepResult(*values) for values in state["results"]]

    def _read(self, manifest: Manifest, trainer: Trainer, same_sample: SameSample) -> dict[str, Any]:
        manifest.require(self.settings)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if manifest.ranks == ranks:
            return _verified(manifest, f"rank-{rank}.pt")
        step = require_resumable(manifest, ranks, same_sample, isinstance(trainer, Reshardable))
        states = [_verified(manifest, name) for name in manifest.files]
        try:
            resharded = cast(Reshardable, trainer).resharded([state["trainer"] for state in states], step)
        except ValueError as error:
            raise CheckpointError(f"cannot resume {manifest.path} with {ranks} ranks: {error}") from error
        # With another number of ranks the steps are different ones, so there are no results yet.
        return {"trainer": resharded, "results": [], "random": states[0]["random"]}


def require_resumable(manifest: Manifest, ranks: int, same_sample: SameSample, reshards: bool) -> int:
    """The step at which ``ranks`` ranks resume a checkpoint of another number of ranks.

    Raises CheckpointError if they cannot. ``reshards``: whether the method can be resumed on other ranks at all.
    """
    there = f"cannot resume {manifest.path} ({manifest.ranks} ranks) with {ranks} ranks:"
    if not reshards:
        raise CheckpointError(f"{there} {manifest.method}'s shards only fit their own number of ranks")
    step = same_sample(manifest.step, manifest.ranks)
    if step is None:
        raise CheckpointError(f"{there} its {manifest.step} steps end inside a step of {ranks} ranks")
    return step


def _write(path: Path, state: Any) -> str:
    """Write ``state`` and wait until it is on disk. Returns the SHA-256 of the file."""
    with path.open("w+b") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verified(manifest: Manifest, name: str) -> dict[str, Any]:
    path = manifest.path / name
    advice = f"remove {manifest.path.name} to resume from the previous checkpoint"
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest.files[name]:
                raise CheckpointError(f"{path} does not match its checksum; {advice}")
            file.seek(0)
            return torch.load(file, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); {advice}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} holds more than plain tensors and is not loaded; {advice}") from error


def _make_empty(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(".step-*.writing"):
        shutil.rmtree(left)
    folder.mkdir()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _each_rank(work: Callable[[], Any], share: bool = True) -> Any:
    """Do ``work`` on every rank. Returns all results (``share``) or this rank's. If one fails, all raise
    CheckpointError."""
    result, failure = None, None
    try:
        result = work()
    except (OSError, ValueError, RuntimeError) as error:
        failure = str(error) if isinstance(error, CheckpointError) else f"checkpoint: {error}"
    results, failed = outcomes(failure, result if share else None)
    if failed:
        raise CheckpointError(failed.why)
    return results if share else result


def _first_rank(work: Callable[[], Any]) -> Any:
    """Do ``work`` on rank 0. Returns its result on every rank. If it fails, all raise CheckpointError."""
    return _each_rank(lambda: work() if dist.get_rank() == 0 else None)[0]
