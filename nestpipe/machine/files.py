"""Writes files whole or not at all, checks that paths can be written before they are needed, and names files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class NotWritable(ValueError):
    """A path cannot be written; the message says which, why and what to do."""


def require_writable(path: Path) -> None:
    """Check that the file ``path`` can be written; only its folder is created. Raises NotWritable with the reason."""
    if path.is_dir():
        raise NotWritable(f"cannot write {path}: it is a folder; name a file in it")
    if path.exists() and not path.is_file():
        return  # a pipe or a device is written to as it is
    path = path.resolve()
    require_writable_folder(path.parent)


def require_writable_folder(folder: Path) -> None:
    """Create ``folder`` if it does not exist, and check that it can be written. Raises NotWritable with the reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise NotWritable(f"cannot write into {folder}: it is not a folder; choose another place") from None
    except OSError as error:
        raise NotWritable(f"cannot write into {folder}: {error.strerror}; choose another place") from None


def write_atomically(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Write the whole file or nothing. Raises OSError, with nothing left behind, if it cannot be written.

    Text is written as UTF-8. ``durable``: the content is on disk when this returns. A link stays a link. A path
    that is not a regular file (``/dev/stdout``, a pipe) is written to, not replaced.
    """
    path = path.resolve()
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def slug(text: str) -> str:
    """``text`` as a part of a file name: "-" replaces everything but letters and digits."""
    return "".join(c if c.isalnum() else "-" for c in text).strip("-")
