"""Small C sources compiled once per version into the user's cache, and loaded."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path


@functools.cache
def library(source_name: str) -> ctypes.CDLL | None:
    """The shared library of ``nestpipe/<source_name>``; None, with a warning, where it cannot be compiled."""
    source = Path(__file__).with_name(source_name)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    compiler = next((name for name in ("gcc", "cc", "clang") if shutil.which(name)), None)
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nestpipe"
        built = folder / f"{source.stem}-{digest}.so"
        if not built.exists():
            if compiler is None:
                raise OSError("no C compiler here")
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                fresh = Path(scratch) / "library.so"
                command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(fresh), str(source)]
                subprocess.run(command, check=True, capture_output=True)
                os.replace(fresh, built)  # atomic: ranks that start together do not meet a half-written file
        return ctypes.CDLL(str(built))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # RuntimeError: a user without a home
        warnings.warn(f"{source_name}: {error}; the slower numpy form runs instead (apt install gcc)", stacklevel=2)
        return None
