"""One writer at a time in a folder, on this machine."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def only_one(folder: Path, error: type[Exception], option: str, busy: str) -> Iterator[None]:
    """Hold ``folder``'s lock; children do not inherit it, so it is free once this process ends.

    Raises ``error``: with ``busy`` where another process holds it, naming ``option`` where the folder cannot be
    written. On a file system without locks nothing is held.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("w")
    except OSError as problem:
        raise error(f"cannot write into {folder}: {problem.strerror}; choose another {option}") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error(busy) from None
        except OSError:
            pass
        yield
