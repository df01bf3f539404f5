"""Compiles small C sources once per version into the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path


class NotCompiled(RuntimeError):
    """A C source cannot be compiled here; the message gives the reason and what to do."""


def compiled(source: Path, flags: Sequence[str] = (), suffix: str = "") -> Path:
    """The program (or the library, depending on ``flags``) compiled from ``source``, cached by the digest of its text.

    Raises NotCompiled in one line.
    """
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nestpipe"
    except RuntimeError as error:  # a user without a home
        raise NotCompiled(f"there is no cache folder ({error}): name one with XDG_CACHE_HOME") from None
    built = folder / f"{source.stem}-{digest}{suffix}"
    if built.exists():
        return built
    compiler = next((name for name in ("gcc", "cc", "clang") if shutil.which(name)), None)
    if compiler is None:
        raise NotCompiled("there is no C compiler: apt install gcc libc6-dev")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / "fresh"
            done = subprocess.run([compiler, *flags, "-o", fresh, source], capture_output=True, text=True)
            if done.returncode != 0:
                lines = done.stderr.splitlines()
                why = next((line for line in lines if "error" in line), done.stderr.strip())
                raise NotCompiled(f"{compiler} says {why!r}: apt install gcc libc6-dev")
            os.replace(fresh, built)  # atomic: ranks that start together do not see a half-written file
    except OSError as error:
        raise NotCompiled(f"{folder} cannot be written ({error.strerror}): name another with XDG_CACHE_HOME") from None
    return built


@functools.cache
def library(source: Path) -> ctypes.CDLL | None:
    """The shared library of ``source``; None, with a warning, if it cannot be compiled or loaded."""
    try:
        return ctypes.CDLL(str(compiled(source, ("-O3", "-shared", "-fPIC"), ".so")))
    except (NotCompiled, OSError) as error:
        warnings.warn(f"{source.name}: {error}; the slower numpy form runs instead", stacklevel=2)
        return None
