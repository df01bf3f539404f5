"""File locks between processes of this machine. A lock is free once its process has ended, however it ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path

#: The errors of a file system that has no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def lock(file: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock of ``file``, which is created if it does not exist. Child processes do not inherit the lock.

    Raises BlockingIOError if another process holds it and ``wait`` is False, OSError if the file cannot be opened or
    its file system has no locks.
    """
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def sole_writer(folder: Path, *, busy: str, option: str, error: type[Exception]) -> Iterator[None]:
    """Keep other processes from writing to ``folder``, which is created if it does not exist.

    Raises ``error``: with the text ``busy`` if another process holds the folder; with a text that names the command
    line's ``option`` if the folder cannot be written. On a file system without locks no lock is held.
    """
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock(folder / ".lock", wait=False))
        except BlockingIOError:
            raise error(busy) from None
        except OSError as problem:
            if problem.errno not in _NO_LOCKS:
                raise error(f"cannot write into {folder}: {problem.strerror}; choose another {option}") from None
        yield
