"""Checkpoints: a method's whole state after a step, saved on all ranks or not at all.

    DIR/METHOD/step-00000012/rank-0.pt ...   plain tensors and numbers (torch.save), read back with weights_only
    DIR/METHOD/step-00000012/manifest.json   written last: step, ranks, configuration, a SHA-256 of each file

DIR/METHOD belongs to one run: a fresh run is refused there, only a resumed one continues. The newest checkpoint is the
one that was saved last, not the one of the largest step: with more ranks, a run is further at a smaller step.
A checkpoint is written under a temporary name and is renamed once every rank's file is on disk, so a folder with a
final name is complete. What a killed run left half-written still has its temporary name, and the next save removes it.
Batches in flight are not saved but read again: the loader's position follows from the step. All ranks of a job share
the file system.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import pickle
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
from nestpipe.training.manifest import (
    FORMAT,
    CheckpointError,
    Manifest,
    SameSample,
    newest,
    origin,
    other_origin,
    read_manifest,
    require_resumable,
    require_unused,
    saved_in,
)

KEEP = 2


@contextlib.contextmanager
def only_writer(folder: str | None) -> Iterator[None]:
    """Within the block, no other run on this machine saves to ``folder``. Raises CheckpointError if one does."""
    if not folder:
        yield
        return
    busy = f"another run saves to {folder}; wait for it, or choose another folder"
    with sole_writer(Path(folder), busy=busy, option="--checkpoint", error=CheckpointError):
        yield


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
        step, rank = trainer.trained, dist.get_rank()
        writing = self.folder / f".step-{step:08d}.writing"
        state = {
            "trainer": trainer.state_dict(),
            "results": [list(vars(result).values()) for result in results],
            "random": torch.get_rng_state(),
        }
        if _first_rank(lambda: self._has_saved(step)):
            return
        _first_rank(lambda: _make_empty(writing))
        digests = _each_rank(lambda: _write(writing / f"rank-{rank}.pt", state))
        _first_rank(lambda: self._complete(writing, step, digests))

    def _own(self) -> list[Manifest]:
        """This run's checkpoints in its folder, the newest last. Others are not looked at, and stay."""
        found = []
        for path in saved_in(self.folder):
            with contextlib.suppress(CheckpointError):
                found.append(read_manifest(path))
        own = (m for m in found if m.method == self.method and m.settings == self._settings_in_file)
        return sorted(own, key=lambda m: (m.number, m.step))

    @property
    def _settings_in_file(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(json.dumps(self.settings)))

    def _has_saved(self, step: int) -> bool:
        return any((m.step, m.ranks) == (step, dist.get_world_size()) for m in self._own()[-1:])

    def _complete(self, writing: Path, step: int, digests: Sequence[str]) -> None:
        own = self._own()
        manifest = {
            "format": FORMAT,
            "method": self.method,
            "step": step,
            "ranks": len(digests),
            "identity": self.settings,
            "files": {f"rank-{rank}.pt": digest for rank, digest in enumerate(digests)},
            "number": own[-1].number + 1 if own else 1,
            "origin": origin(),
        }
        write_atomically(writing / "manifest.json", json.dumps(manifest, indent=1))
        _sync(writing)
        names = itertools.chain([f"step-{step:08d}"], (f"step-{step:08d}-{n}" for n in itertools.count(2)))
        os.replace(writing, next(place for name in names if not (place := self.folder / name).exists()))
        _sync(self.folder)
        for old in own[: len(own) + 1 - KEEP]:
            shutil.rmtree(old.path, ignore_errors=True)

    def begin(self) -> None:
        """Before a run that does not resume. Raises CheckpointError on every rank if the folder is another run's."""
        _first_rank(lambda: require_unused(self.folder))

    def load(self, trainer: Trainer, same_sample: SameSample, steps: int | None = None) -> Loaded | None:
        """Bring ``trainer`` to the newest checkpoint. Returns what it holds, or None if there is no checkpoint.

        ``steps``: how many the run will have in all, if that is known.

        Raises CheckpointError on every rank, before any has changed its state, for a file that does not match its
        checksum, another configuration, a number of ranks that the method cannot resume with, or more than ``steps``.
        """
        manifest: Manifest | None = _first_rank(lambda: newest(self.folder))
        if manifest is None:
            return None
        state, results = _each_rank(lambda: self._read(manifest, trainer, same_sample, steps), share=False)
        trainer.load_state_dict(state["trainer"])
        torch.set_rng_state(state["random"])
        return Loaded(results, _first_rank(lambda: other_origin(manifest)))

    def _read(
        self, manifest: Manifest, trainer: Trainer, same_sample: SameSample, steps: int | None
    ) -> tuple[dict[str, Any], list[StepResult]]:
        manifest.require(self._settings_in_file)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        step = require_resumable(manifest, ranks, same_sample, isinstance(trainer, Reshardable), steps)
        if manifest.ranks == ranks:
            state = _verified(manifest, f"rank-{rank}.pt")
            try:
                return state, [StepResult(*values) for values in state["results"]]
            except (KeyError, TypeError) as error:
                raise CheckpointError(f"{manifest.path} is of another version of nestpipe ({error})") from error
        states = [_verified(manifest, name) for name in manifest.files]
        try:
            resharded = cast(Reshardable, trainer).resharded([state["trainer"] for state in states], step)
        except ValueError as error:
            raise CheckpointError(f"cannot resume {manifest.path} with {ranks} ranks: {error}") from error
        # With another number of ranks the steps are different ones, so there are no results yet.
        return {"trainer": resharded, "random": states[0]["random"]}, []


@dataclass(frozen=True)
class Loaded:
    """``results``: those of the steps before. ``note``: says if another commit or version saved it, else empty."""

    results: list[StepResult]
    note: str


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
    except CheckpointError as error:
        failure = str(error)
    except Exception as error:  # whatever it is: if only one rank raised, the others would wait for it
        kind = "" if isinstance(error, (OSError, ValueError, RuntimeError)) else f"{type(error).__name__}: "
        failure = f"checkpoint: {kind}{error}"
    results, failed = outcomes(failure, result if share else None)
    if failed:
        raise CheckpointError(failed.why)
    return results if share else result


def _first_rank(work: Callable[[], Any]) -> Any:
    """Do ``work`` on rank 0. Returns its result on every rank. If it fails, all raise CheckpointError."""
    return _each_rank(lambda: work() if dist.get_rank() == 0 else None)[0]
