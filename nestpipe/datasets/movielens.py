"""MovieLens (Harper and Konstan, 2015): a user, item, rating and time per row, in each of its published layouts.

100K has ``u.data`` (tab-separated), 1M and 10M ``ratings.dat`` (``::``), later sets ``ratings.csv`` (a header,
commas, half stars, ids with gaps). Every rating is an interaction, whatever its value. The split is leave-one-out:
the last item of each user in time order (ties in file order) is for testing.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from nestpipe.config import DataConfig
from nestpipe.data.dataset import DataError, Histories, flat_ranges
from nestpipe.data.text_blocks import BadRows, blocks

_FIELDS = ("user id", "item id", "rating", "timestamp")
_FILES = ("u.data", "ratings.dat", "ratings.csv")
_SEPARATORS = {b"\t": "tab", b"::": "'::'", b",": "comma"}
_HEADER = b"userId,movieId,rating,timestamp"
_WHOLE, _DECIMAL = rb"[0-9]{1,18}", rb"[0-9]+(?:\.[0-9]+)?"


def movielens_histories(config: DataConfig, seed: int) -> Histories:
    """Read ``config.data_path``, the file or its folder. Raises DataError."""
    rows, bad = read_rows(_find(config.data_path), skip=config.on_bad_row == "skip")
    users, items, times = rows.T
    order = np.lexsort((times, users))  # stable: ties stay in file order
    _, first = np.unique(users[order], return_index=True)
    _, dense_items = np.unique(items, return_inverse=True)
    flat_items, flat_times = dense_items[order].astype(np.int64), np.ascontiguousarray(times[order])
    ends = np.append(first[1:], len(order))

    def read(users: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        where = flat_ranges(first[users] + starts, counts)
        return flat_items[where], flat_times[where]

    return Histories(
        items=int(dense_items.max()) + 1,
        lengths=ends - first - 1,
        test_items=flat_items[ends - 1],
        read=read,
        bad_rows=bad.count,
        bad_row_examples=bad.examples,
    )


def read_rows(path: Path, skip: bool = False) -> tuple[np.ndarray, BadRows]:
    """int64 [rows, 3] of user, item, timestamp as written, and the rows that were skipped.

    Raises DataError on a bad row unless ``skip``, and on a file without any good row.
    """
    bad, good, lines = BadRows(skip, DataError), [np.empty((0, 3), dtype=np.int64)], 0
    separator = b"\t"
    try:
        for block in blocks(path):
            text, first_line = block.text, block.first_line
            if first_line == 1:
                separator = _separator(text)
                if separator == b"," and text.startswith(_HEADER + b"\n"):
                    text, first_line = text[len(_HEADER) + 1 :], 2
            row = re.escape(separator).join([rb"^(%b)" % _WHOLE, rb"(%b)" % _WHOLE, _DECIMAL, rb"(%b)$" % _WHOLE])
            pattern = re.compile(row, re.MULTILINE)
            matches, here = pattern.findall(text), text.count(b"\n")
            if matches:
                good.append(np.array(matches).astype(np.int64))
            lines += here
            if len(matches) != here:  # the slow way, to name the rows
                for number, line in enumerate(text.removesuffix(b"\n").split(b"\n"), first_line):
                    if not pattern.fullmatch(line):
                        bad.add(path, number, _what_is_wrong(line, separator))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check --data-path") from None
    rows = np.concatenate(good)
    if not len(rows):
        found = f"none of {lines} rows is usable" if lines else "the file is empty"
        raise DataError(f"{path}: {found}; expected user, item, rating, timestamp (MovieLens {', '.join(_FILES)})")
    return rows, bad


def _separator(text: bytes) -> bytes:
    """The most frequent separator at the start of the text; a tab if there is no separator."""
    head = text[:4096]
    return max(_SEPARATORS, key=head.count) if any(s in head for s in _SEPARATORS) else b"\t"


def _find(path: str | None) -> Path:
    what = f"the ratings of MovieLens ({', '.join(_FILES)}) or their folder"
    if path is None:
        raise DataError(f"movielens: no file given; pass --data-path with {what}")
    found = Path(path)
    if found.is_dir():
        found = next((found / name for name in _FILES if (found / name).is_file()), found / _FILES[0])
    if not found.is_file():
        raise DataError(f"{found}: no such file; pass --data-path with {what}")
    return found


def _what_is_wrong(line: bytes, separator: bytes) -> str:
    fields = line.split(separator)
    if not line.strip():
        return "empty line"
    if len(fields) != len(_FIELDS):
        kind = _SEPARATORS[separator]
        return f"{len(fields)} {kind}-separated fields, expected {len(_FIELDS)} (user, item, rating, timestamp)"
    for name, field in zip(_FIELDS, fields, strict=True):
        shown = field.decode("utf-8", "replace")[:40]
        if re.fullmatch(rb"-[0-9]+(\.[0-9]+)?", field):
            return f"{name} {shown} is negative"
        if not re.fullmatch(rb"[0-9]+(\.[0-9]+)?" if name == "rating" else rb"[0-9]+", field):
            return f"{name} {shown!r} is not a number" + ("" if name == "rating" else " without sign or fraction")
        if name != "rating" and len(field) > 18:
            return f"{name} {shown} is too large"
    return "malformed row"
