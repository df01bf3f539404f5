"""Reads the rows of a KuaiRand log from CSV text, strictly and fast: who was shown which video, and when.

A block that has only digits, commas, signs and line feeds goes through pyarrow's CSV reader. A block with any other
byte, or one that does not give one valid row per line, goes line by line through Python's reader, with the same rules.
A row has as many fields as the header. User, video and time are whole numbers of at most 18 digits (not counting
leading zeros), not negative, with or without quotes. The other columns are not checked.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nestpipe.data.dataset import DataError
from nestpipe.data.text_blocks import BLOCK_BYTES, BadRows, Block, blocks

#: The columns that are read: user, video, time (milliseconds since 1970).
USED = ("user_id", "video_id", "time_ms")
_MAX_DIGITS = 18
_UNUSUAL = np.ones(256, dtype=bool)
_UNUSUAL[np.frombuffer(b"0123456789,-\n", dtype=np.uint8)] = False


@dataclass(frozen=True)
class LogRows:
    """Some rows of a log in file order, int64 [rows] each. ``bytes_read``: bytes of the file read so far."""

    users: np.ndarray
    videos: np.ndarray
    times: np.ndarray
    bytes_read: int


def read_log(path: Path, bad: BadRows, size: int = BLOCK_BYTES) -> Iterator[LogRows]:
    """All rows of one file. Raises DataError if the file cannot be read, changes during reading or has a wrong header.

    Bad rows go to ``bad``.
    """
    try:
        bytes_there = path.stat().st_size
        columns: list[str] | None = None
        end = 0
        for block in blocks(path, size):
            end = block.end
            if columns is None:
                columns, block = _header(path, block)
            yield _rows(path, block, columns, bad)
        if columns is None:
            bad.add(path, 1, "the file is empty")
        if end != bytes_there:
            raise DataError(f"{path}: {bytes_there} bytes when reading began, {end} at the end; it is being written to")
    except FileNotFoundError:
        raise DataError(f"{path}: has vanished; put it back and start again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check --data-path") from None


def _header(path: Path, block: Block) -> tuple[list[str], Block]:
    line, _, text = block.text.partition(b"\n")
    try:
        columns = next(csv.reader([line.decode("utf-8-sig")]), [])
    except (UnicodeDecodeError, csv.Error):
        columns = []
    if missing := [name for name in USED if columns.count(name) != 1]:
        shown = line.decode("utf-8", "replace")[:60]
        raise DataError(
            f"{path}:1: the header lacks {', '.join(missing)} ({shown!r}); expected a KuaiRand log in UTF-8 with "
            "the columns user_id, video_id, date, hourmin, time_ms and so on"
        )
    return columns, Block(text, block.first_line + 1, block.end)


def _rows(path: Path, block: Block, columns: Sequence[str], bad: BadRows) -> LogRows:
    rows = _fast(block, columns)
    if rows is None:
        rows = _line_by_line(path, block, columns, bad)
    return LogRows(*rows, bytes_read=block.end)


def _fast(block: Block, columns: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """The three columns, or None if any line may be bad."""
    import pyarrow.csv  # a large package that only this data set needs

    if not block.text:
        return None
    if _UNUSUAL[np.frombuffer(block.text, dtype=np.uint8)].any():
        return None
    try:
        table = pyarrow.csv.read_csv(
            pyarrow.BufferReader(block.text),
            read_options=pyarrow.csv.ReadOptions(
                use_threads=False, block_size=len(block.text) + 1, column_names=[str(n) for n in range(len(columns))]
            ),
            parse_options=pyarrow.csv.ParseOptions(quote_char=False, ignore_empty_lines=False),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=[str(columns.index(name)) for name in USED],
                column_types={str(columns.index(name)): pyarrow.int64() for name in USED},
                null_values=[],
            ),
        )
    except pyarrow.ArrowInvalid:
        return None
    if table.num_rows != block.lines:
        return None
    users, videos, times = (column.to_numpy() for column in table.columns)
    sound = all(column.min() >= 0 and column.max() < 10**_MAX_DIGITS for column in (users, videos, times))
    return (users, videos, times) if sound else None


def _line_by_line(
    path: Path, block: Block, columns: Sequence[str], bad: BadRows
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    used = [columns.index(name) for name in USED]
    good: list[list[int]] = []
    for number, line in enumerate(block.text.split(b"\n")[: block.lines], block.first_line):
        fields, complaint = _fields(line)
        if not complaint:
            complaint = _complaint(fields, columns)
        if complaint:
            bad.add(path, number, complaint)
        else:
            good.append([int(fields[at]) for at in used])
    users, videos, times = np.array(good, dtype=np.int64).reshape(-1, 3).T.copy()
    return users, videos, times


def _fields(line: bytes) -> tuple[list[str], str]:
    """The fields of a line, and why it has none ("" if it has fields)."""
    if not line.strip():
        return [], "empty line"
    try:
        return next(csv.reader([line.decode("utf-8")], strict=True)), ""
    except UnicodeDecodeError:
        return [], "not UTF-8"
    except csv.Error as error:
        return [], f"broken quotes ({error})"


def _complaint(fields: Sequence[str], columns: Sequence[str]) -> str:
    """What is wrong with a row, "" if it is good."""
    if list(fields) == list(columns):
        return "a second header"
    if len(fields) != len(columns):
        return f"{len(fields)} fields, expected {len(columns)}"
    for name in USED:
        field = fields[columns.index(name)]
        if not re.fullmatch(r"-?[0-9]+", field, re.ASCII):
            return f"{name} {field[:40]!r} is not a whole number"
        if len(field.lstrip("-0")) > _MAX_DIGITS:
            return f"{name} {field[:40]} is too large"
        if int(field) < 0:
            return f"{name} {field} is negative"
    return ""
