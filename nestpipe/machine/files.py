"""Files that are whole or not there, and places tried before they are needed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class NotWritable(ValueError):
    """A place that cannot be written; the message says which, why and what to do."""


def require_writable(path: Path) -> None:
    """Try to write the file ``path`` and leave nothing there but its folder. Raises NotWritable with the reason."""
    if path.is_dir():
        raise NotWritable(f"cannot write {path}: it is a folder; name a file in it")
    if path.exists() and not path.is_file():
        return  # a pipe or a device is written to as it is
    path = path.resolve()
    require_writable_folder(path.parent)


def require_writable_folder(folder: Path) -> None:
    """Make ``folder`` if need be, and try to write in it. Raises NotWritable with the reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise NotWritable(f"cannot write into {folder}: it is no folder; choose another place") from None
    except OSError as error:
        raise NotWritable(f"cannot write into {folder}: {error.strerror}; choose another place") from None


def write_atomically(path: Path, text: str) -> None:
    """The file is there whole or not at all. Raises OSError, with nothing left behind, where it cannot be written.

    A link stays one, and what is no file (``/dev/stdout``, a pipe) is written to, not put away.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
