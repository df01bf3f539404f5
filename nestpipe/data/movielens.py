"""MovieLens 100K (Harper and Konstan, 2015): ``u.data``, tab-separated user, item, rating, time.

Every rating is an interaction, whatever its value. Split: leave one out, the last item of each user
in time order (ties in file order) is for testing.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.data.dataset import DataError, Dataset, flat_ranges

_ROW = re.compile(rb"^([0-9]{1,18})\t([0-9]{1,18})\t[0-9]+(?:\.[0-9]+)?\t([0-9]{1,18})\r?$", re.MULTILINE)
_FIELDS = ("user id", "item id", "rating", "timestamp")
_NAMED = 5  # bad rows that are remembered by name


def load_movielens(config: DataConfig, model: ModelConfig, seed: int) -> Dataset:
    """Read ``config.data_path``, the file or its folder. Raises DataError."""
    rows, bad_rows, examples = read_rows(_find(config.data_path), skip=config.on_bad_row == "skip")
    users, items, times = rows.T
    order = np.lexsort((times, users))  # stable: ties stay in file order
    _, first = np.unique(users[order], return_index=True)
    _, dense_items = np.unique(items, return_inverse=True)
    flat_items, flat_times = dense_items[order].astype(np.int64), np.ascontiguousarray(times[order])
    ends = np.append(first[1:], len(order))

    def read(users: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        where = flat_ranges(first[users] + starts, counts)
        return flat_items[where], flat_times[where]

    return Dataset(
        name="movielens",
        items=int(dense_items.max()) + 1,
        lengths=ends - first - 1,
        test_items=flat_items[ends - 1],
        read=read,
        batch_size=config.batch_size,
        negatives=config.negatives,
        sequence_length=model.sequence_length,
        windows=config.windows,
        seed=seed,
        bad_rows=bad_rows,
        bad_row_examples=examples,
    )


def read_rows(path: Path, skip: bool = False) -> tuple[np.ndarray, int, tuple[str, ...]]:
    """int64 [rows, 3] of user, item, timestamp as written; how many rows were bad; the first few of them.

    Raises DataError on a bad row unless ``skip``, and on a file without one good row.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check --data-path") from None
    lines = text.count(b"\n") + (not text.endswith(b"\n") and text != b"")
    good = _ROW.findall(text)
    bad: list[str] = []
    if len(good) != lines:  # the slow way, to name the rows
        for number, line in enumerate(text.split(b"\n"), 1):
            if number <= lines and not _ROW.fullmatch(line):
                bad.append(f"{path}:{number}: {_what_is_wrong(line)}")
                if not skip:
                    raise DataError(f"{bad[0]}; correct the line, or pass --on-bad-row skip")
    if not good:
        found = f"none of {lines} rows is usable" if lines else "the file is empty"
        raise DataError(f"{path}: {found}; expected tab-separated user, item, rating, timestamp (MovieLens u.data)")
    return np.array(good).astype(np.int64), len(bad), tuple(bad[:_NAMED])


def _find(path: str | None) -> Path:
    if path is None:
        raise DataError("movielens: no file named; pass --data-path, the u.data file of MovieLens 100K or its folder")
    found = Path(path)
    if found.is_dir():
        found = found / "u.data"
    if not found.is_file():
        raise DataError(f"{found}: no such file; pass --data-path, the u.data file of MovieLens 100K or its folder")
    return found


def _what_is_wrong(line: bytes) -> str:
    fields = line.rstrip(b"\r").split(b"\t")
    if not line.strip():
        return "empty line"
    if len(fields) != len(_FIELDS):
        return f"{len(fields)} tab-separated fields, expected {len(_FIELDS)} (user, item, rating, timestamp)"
    for name, field in zip(_FIELDS, fields, strict=True):
        shown = field.decode("utf-8", "replace")[:40]
        if re.fullmatch(rb"-[0-9]+(\.[0-9]+)?", field):
            return f"{name} {shown} is negative"
        if not re.fullmatch(rb"[0-9]+(\.[0-9]+)?" if name == "rating" else rb"[0-9]+", field):
            return f"{name} {shown!r} is not a number" + ("" if name == "rating" else " without sign or fraction")
        if name != "rating" and len(field) > 18:
            return f"{name} {shown} is too large"
    return "malformed row"
