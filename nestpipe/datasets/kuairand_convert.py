"""Converts KuaiRand's logs, once, to a compact form that is memory-mapped from then on. Two passes in bounded memory.

1. Every file is read block by block: rows are written to buckets on disk by user, and the videos seen are recorded.
2. The vocabulary is built. Then each bucket, which fits in memory, is sorted by user and time and appended.

The result is ``items.npy`` and ``times.npy`` (int32 video numbers and seconds), in which a user's history is
contiguous; ``first.npy`` (int64 [users, 2]: the first row and the number of rows of each user); ``user_ids.npy`` and
``video_ids.npy``, the published ids by number; and ``meta.json``, written last. All files are written in a folder with
another name, which is renamed at the end, so an interrupted conversion cannot be mistaken for a whole one. The next
start removes what is left of it and starts clean. If several processes start, one converts and the others wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from nestpipe.data.dataset import DataError
from nestpipe.data.text_blocks import BadRows
from nestpipe.datasets.kuairand_rows import LogRows, read_log
from nestpipe.machine.locking import lock
from nestpipe.machine.progress import Advance, progress

#: Changes when the converted form changes.
FORMAT = 1
_BUCKET_BYTES = 160 << 20  # of CSV text: about two million rows
_MAX_BUCKETS = 512
_BITMAP_IDS = 1 << 28  # ids below are recorded in a byte each, larger ones in sorted lists
_ROW = np.dtype([("user", "<i8"), ("video", "<i8"), ("time", "<i8")])


def convert(files: Sequence[Path], folder: Path, skip: bool) -> None:
    """Convert ``files`` into ``folder``. Raises DataError for a bad row (unless ``skip``), no good row, no space."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        with lock(folder.with_name(f".{folder.name}.lock")):
            if (folder / "meta.json").exists():
                return  # another process did it while this one waited
            for remains in (partial, folder):
                shutil.rmtree(remains, ignore_errors=True)
            partial.mkdir()
            try:
                _convert(files, partial, skip)
                os.replace(partial, folder)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        where = error.filename or folder
        raise DataError(f"{where}: {error.strerror}; the converted form is written next to the logs") from None


def _convert(files: Sequence[Path], folder: Path, skip: bool) -> None:
    total = sum(_size(file) for file in files)
    bad = BadRows(skip, DataError)
    with progress("reading logs", total) as advance:
        rows, seen = _deal_out(files, folder, max(1, min(_MAX_BUCKETS, -(-total // _BUCKET_BYTES))), bad, advance)
    if not rows:
        what = f"none of {bad.count} rows is usable: {bad.examples[0]}" if bad.count else "there is no row"
        raise DataError(f"{files[0].parent}: {what}; expected KuaiRand's log_standard*.csv")
    videos = seen.ids()
    small = videos[-1] <= np.iinfo(np.int32).max
    np.save(folder / "video_ids.npy", videos.astype(np.int32) if small else videos)
    numbers = seen.numbers(videos)
    with progress("ordering histories", rows) as advance:
        _lay_out(folder, rows, numbers, advance)
    meta = {
        "format": FORMAT,
        "rows": rows,
        "videos": len(videos),
        "files": [file.name for file in files],
        "bad_rows": bad.count,
        "bad_row_examples": bad.examples,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _deal_out(
    files: Sequence[Path], folder: Path, buckets: int, bad: BadRows, advance: Advance
) -> tuple[int, VideosSeen]:
    """Write the ``bucket-N`` files. Returns the number of rows and the videos."""
    count, seen = 0, VideosSeen()
    with contextlib.ExitStack() as stack:
        open_files = [stack.enter_context((folder / f"bucket-{b}").open("wb")) for b in range(buckets)]
        for file in files:
            done = 0
            for rows in read_log(file, bad):
                seen.add(rows.videos)
                _deal(rows, open_files)
                count += len(rows.users)
                advance(rows.bytes_read - done)
                done = rows.bytes_read
    return count, seen


def _deal(rows: LogRows, open_files: Sequence[IO[bytes]]) -> None:
    packed = np.empty(len(rows.users), dtype=_ROW)
    packed["user"], packed["video"], packed["time"] = rows.users, rows.videos, rows.times
    bucket = (rows.users % len(open_files)).astype(np.uint16)
    order = np.argsort(bucket, kind="stable")  # the order inside a bucket is that of the log
    ends = np.cumsum(np.bincount(bucket, minlength=len(open_files)))
    for b, piece in enumerate(np.split(packed[order], ends[:-1])):
        if len(piece):
            open_files[b].write(piece.tobytes())


def _lay_out(folder: Path, rows: int, numbers: VideoNumbers, advance: Advance) -> None:
    users, begins, counts, at = [], [], [], 0
    with _column(folder / "items.npy", rows) as items, _column(folder / "times.npy", rows) as times:
        for bucket in sorted(folder.glob("bucket-*"), key=lambda path: int(path.name.partition("-")[2])):
            part = np.fromfile(bucket, dtype=_ROW)
            bucket.unlink()
            order = np.lexsort((part["time"], part["user"]))  # stable: ties stay in the order of the logs
            part = part[order]
            _, first, count = np.unique(part["user"], return_index=True, return_counts=True)
            users.append(part["user"][first])
            begins.append(first + at)
            counts.append(count)
            numbers(part["video"]).tofile(items)
            # Seconds after 2038 would not fit. They are clamped, which keeps their order.
            np.minimum(part["time"] // 1000, np.iinfo(np.int32).max).astype(np.int32).tofile(times)
            at += len(part)
            advance(len(part))
    ids = np.concatenate(users)
    order = np.argsort(ids)
    np.save(folder / "user_ids.npy", ids[order])
    np.save(folder / "first.npy", np.stack([np.concatenate(begins), np.concatenate(counts)], axis=1)[order])


@contextlib.contextmanager
def _column(path: Path, rows: int) -> Iterator[IO[bytes]]:
    """A .npy file of int32 [rows] to append to. (A memory map would count as memory while it is filled.)"""
    with path.open("wb") as file:
        head = {"descr": np.dtype(np.int32).str, "fortran_order": False, "shape": (rows,)}
        np.lib.format.write_array_header_1_0(file, head)
        yield file


class VideosSeen:
    """The distinct ids of a stream: a bitmap for small ones, merged sorted lists for large ones."""

    def __init__(self) -> None:
        self._bitmap = np.zeros(1 << 16, dtype=bool)
        self._large = np.empty(0, dtype=np.int64)
        self._waiting: list[np.ndarray] = []

    def add(self, ids: np.ndarray) -> None:
        large = ids >= _BITMAP_IDS
        if large.any():
            self._waiting.append(np.unique(ids[large]))
            if sum(map(len, self._waiting)) > max(1 << 20, len(self._large)):
                self._merge()
            ids = ids[~large]
        if len(ids):
            top = int(ids.max())
            if top >= len(self._bitmap):
                grown = np.zeros(min(_BITMAP_IDS, max(top + 1, 2 * len(self._bitmap))), dtype=bool)
                grown[: len(self._bitmap)] = self._bitmap
                self._bitmap = grown
            self._bitmap[ids] = True

    def _merge(self) -> None:
        self._large = np.unique(np.concatenate([self._large, *self._waiting]))
        self._waiting = []

    def ids(self) -> np.ndarray:
        """int64, ascending."""
        self._merge()
        return np.concatenate([np.flatnonzero(self._bitmap), self._large])

    def numbers(self, ids: np.ndarray) -> VideoNumbers:
        return VideoNumbers(self._bitmap, ids)


class VideoNumbers:
    """Maps ids to their positions in the ascending vocabulary ``ids``, int32."""

    def __init__(self, bitmap: np.ndarray, ids: np.ndarray) -> None:
        self._ids = ids
        self._place = np.cumsum(bitmap, dtype=np.int32) - np.int32(1)

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        small = ids < len(self._place)
        if small.all():
            return self._place[ids]
        numbers = np.empty(len(ids), dtype=np.int32)
        numbers[small] = self._place[ids[small]]
        numbers[~small] = np.searchsorted(self._ids, ids[~small])
        return numbers


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        raise DataError(f"{file}: has vanished; put it back and start again") from None
