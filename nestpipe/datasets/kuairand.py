"""KuaiRand 27K, 1K and Pure (Gao et al., CIKM 2022): logs of what was shown to whom, from the published CSV files.

It reads the standard logs: ``log_standard*.csv`` in the folder or in its ``data`` folder, or one file given by name.
Every exposure is an interaction, whatever the feedback. A user's history is in time order; ties are in the order of
file names and lines. The split is leave-one-out: the last item is for testing. The first start converts the logs
(``kuairand_convert``), and every start maps the result into memory. Users and videos are numbered in the order of the
published ids, so batches are always the same.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from nestpipe.config import DataConfig
from nestpipe.data.dataset import DataError, Histories, flat_ranges
from nestpipe.datasets.kuairand_convert import FORMAT, convert


def kuairand_histories(config: DataConfig, seed: int) -> Histories:
    """The logs at ``config.data_path``, converted if that has not been done yet. Raises DataError."""
    files = find_logs(config.data_path)
    folder = converted_folder(files)
    skip = config.on_bad_row == "skip"
    meta = _meta(folder)
    if meta is None:
        convert(files, folder, skip)
        meta = _meta(folder)
        assert meta is not None
    if meta["bad_rows"] and not skip:
        raise DataError(
            f"{meta['bad_row_examples'][0]} ({meta['bad_rows']} bad rows were skipped when the logs were converted); "
            "correct the logs, or pass --on-bad-row skip"
        )
    first = np.load(folder / "first.npy")  # [users + 1], in order of users
    begins, lengths = first[:, 0], first[:, 1]
    items, times = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("items", "times"))

    def read(users: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        where = flat_ranges(begins[users] + starts, counts)
        return items[where].astype(np.int64), times[where].astype(np.int64)

    return Histories(
        items=meta["videos"],
        lengths=lengths - 1,
        test_items=items[begins + lengths - 1].astype(np.int64),
        read=read,
        bad_rows=meta["bad_rows"],
        bad_row_examples=tuple(meta["bad_row_examples"]),
    )


def find_logs(path: str | None) -> list[Path]:
    """The log files, sorted by name. Raises DataError."""
    what = "the folder of KuaiRand's log_standard*.csv"
    if path is None:
        raise DataError(f"kuairand: no folder given; pass --data-path with {what}")
    place = Path(path)
    if place.is_file():
        return [place.resolve()]
    for folder in (place, place / "data"):
        if files := sorted(folder.glob("log_standard*.csv")):
            return [file.resolve() for file in files]
    raise DataError(f"{place}: no log_standard*.csv there; pass --data-path with {what}")


def converted_folder(files: list[Path]) -> Path:
    """The folder for the converted form of these files, as they are now: it is next to them. Raises DataError."""
    try:
        facts = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    except OSError as error:
        raise DataError(f"{error.filename}: has vanished; put it back and start again") from None
    name = hashlib.sha256(json.dumps([FORMAT, facts]).encode()).hexdigest()[:12]
    return files[0].parent / f"nestpipe-{name}"


def _meta(folder: Path) -> dict | None:
    try:
        return json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: cannot be read ({error}); remove it to have the logs converted again") from None
