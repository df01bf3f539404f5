"""KuaiRand's logs: the same histories whatever the order of rows, and a clean start after an interruption."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import time

import numpy as np
import pytest
import torch

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.data import DataError
from nestpipe.data.text_blocks import BadRows
from nestpipe.datasets import kuairand_convert
from nestpipe.datasets.kuairand import converted_folder, find_logs
from nestpipe.datasets.kuairand_convert import VideosSeen, convert
from nestpipe.datasets.kuairand_rows import read_log
from nestpipe.datasets.loader import load_dataset
from tests.support.kuairand_logs import COLUMNS, GOOD, load, row, write


def histories(dataset) -> list[tuple[list[int], list[int]]]:
    counts = dataset.lengths + (dataset.test_items >= 0)
    return [
        tuple(x.tolist() for x in dataset.read(np.array([u]), np.array([0]), counts[u : u + 1]))
        for u in range(dataset.users)
    ]


def scattered(seed: int = 0, rows: int = 200) -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    return list(zip(*(rng.integers(0, top, rows).tolist() for top in (9, 40, 10**7)), strict=True))


def test_order_by_time_within_a_user_over_files_with_gaps_in_ids(tmp_path):
    write(
        tmp_path,
        b=[row(900, 5_000_000, 3_000), row(7, 12, 9_000), row(900, 12, 1_999)],
        a=[row(7, 400, 9_000), row(900, 3, 5_000), row(7, 5_000_000, 1_000)],
    )
    dataset = load(tmp_path)
    assert (dataset.users, dataset.items) == (2, 4)  # users 7, 900; videos 3, 12, 400, 5,000,000
    assert dataset.lengths.tolist() == [2, 2] and dataset.test_items.tolist() == [1, 0]
    assert histories(dataset) == [([3, 2, 1], [1, 9, 9]), ([1, 3, 0], [1, 3, 5])]  # a tie: file a before file b


def test_against_sorting_in_python(tmp_path, monkeypatch):
    monkeypatch.setattr(kuairand_convert, "_BUCKET_BYTES", 2000)  # several buckets
    rows = scattered()
    write(tmp_path, a=[row(*r) for r in rows[:80]], b=[row(*r) for r in rows[80:]])
    videos = sorted({v for _, v, _ in rows})
    wanted = []
    for user in sorted({u for u, _, _ in rows}):
        mine = sorted((r for r in rows if r[0] == user), key=lambda r: r[2])
        wanted.append(([videos.index(v) for _, v, _ in mine], [t // 1000 for _, _, t in mine]))
    assert histories(load(tmp_path)) == wanted


def test_first_and_later_starts_give_the_same_batches_and_later_ones_do_not_read_the_logs(tmp_path, monkeypatch):
    write(tmp_path, a=[row(*r) for r in scattered()])
    first = list(load(tmp_path, batch_size=4).batches(0, 1, epochs=1))
    monkeypatch.setattr("nestpipe.datasets.kuairand_convert.read_log", None)
    again = list(load(tmp_path, batch_size=4).batches(0, 1, epochs=1))
    assert len(first) == len(again) > 5
    for one, other in zip(first, again, strict=True):
        for feature in one.sparse:
            assert torch.equal(one.sparse[feature].flat, other.sparse[feature].flat)
    assert not list(tmp_path.glob(".nestpipe-*.partial"))


def test_changed_logs_are_converted_again(tmp_path):
    write(tmp_path, a=[row(1, 1, 1), row(1, 2, 2)])
    assert load(tmp_path).items == 2
    write(tmp_path, a=[row(1, 1, 1), row(1, 2, 2), row(1, 3, 3)])
    assert load(tmp_path).items == 3


def when_it_advances(stage, act):
    """Replaces the progress bar of a conversion: ``act`` is called when a first part of ``stage`` is done."""

    @contextlib.contextmanager
    def progress(title, total):
        yield lambda amount: act() if title == stage else None

    return progress


def test_an_interrupted_conversion_starts_clean(tmp_path, monkeypatch):
    write(tmp_path, a=[row(*r) for r in scattered()])
    wanted_files = find_logs(str(tmp_path))
    folder = converted_folder(wanted_files)
    context = multiprocessing.get_context("fork")
    for stage in ("reading logs", "ordering histories"):
        with monkeypatch.context() as patch:
            patch.setattr(kuairand_convert, "progress", when_it_advances(stage, lambda: os.kill(os.getpid(), 9)))
            child = context.Process(target=convert, args=(wanted_files, folder, False))
            child.start()
            child.join()
        assert child.exitcode == -9 and not folder.exists()
        assert list(tmp_path.glob(".nestpipe-*.partial"))
    assert load(tmp_path).users == 9
    assert not list(tmp_path.glob(".nestpipe-*.partial"))


def test_processes_that_start_together_convert_once(tmp_path):
    write(tmp_path, a=[row(*r) for r in scattered()])
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=load, args=(tmp_path,)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4 and load(tmp_path).users == 9


def test_a_file_that_vanishes_or_grows_during_reading(tmp_path, monkeypatch):
    write(tmp_path, a=GOOD, b=GOOD)
    files = find_logs(str(tmp_path))
    folder = converted_folder(files)
    with monkeypatch.context() as patch:
        patch.setattr(kuairand_convert, "progress", when_it_advances("reading logs", files[1].unlink))
        with pytest.raises(DataError, match=r"log_standard_b\.csv: has vanished"):
            convert(files, folder, skip=True)
    assert not folder.exists()
    write(tmp_path, b=GOOD)

    rows = read_log(files[0], BadRows(False, DataError))
    next(rows)
    with files[0].open("a") as file:
        file.write(GOOD[0] + "\n")
    with pytest.raises(DataError, match="being written to"):
        list(rows)


def test_vocabulary_of_small_and_large_ids(monkeypatch):
    monkeypatch.setattr(kuairand_convert, "_BITMAP_IDS", 1 << 17)
    seen, rng = VideosSeen(), np.random.default_rng(0)
    ids = [rng.integers(0, top, 500) for top in (100, 1 << 16, 1 << 18, 10**18, 1 << 17)]
    for piece in ids:
        seen.add(piece)
    wanted = np.unique(np.concatenate(ids))
    assert np.array_equal(seen.ids(), wanted)
    numbers = seen.numbers(wanted)
    for piece in ids:
        assert np.array_equal(wanted[numbers(piece)], piece)


ROWS = int(os.environ.get("NESTPIPE_KUAIRAND_ROWS", 20_000_000))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_twenty_million_rows(tmp_path, capsys):
    """Rows per second, peak memory, size on disk, batches per second from the map."""
    files, per_file = 5, ROWS // 5
    rng = np.random.default_rng(1)
    csv_bytes = 0
    for n in range(files):
        path = tmp_path / f"log_standard_{n}.csv"
        with path.open("w") as file:
            file.write(COLUMNS + "\n")
            for _ in range(0, per_file, 200_000):
                users = rng.integers(0, 27_285, 200_000)
                videos = (32_038_693 * rng.random(200_000) ** 3).astype(np.int64)
                times = rng.integers(1_649_376_000_000, 1_652_000_000_000, 200_000)
                played = rng.integers(0, 200_000, 200_000)
                file.writelines(
                    f"{u},{v},20220408,1200,{t},0,0,0,0,0,0,1,{p},{p},0,0,0,0,1\n"
                    for u, v, t, p in zip(users.tolist(), videos.tolist(), times.tolist(), played.tolist(), strict=True)
                )
        csv_bytes += path.stat().st_size
    files_found = find_logs(str(tmp_path))
    folder = converted_folder(files_found)
    pipe, other = multiprocessing.Pipe()

    def measured() -> None:
        started = time.perf_counter()
        convert(files_found, folder, False)
        other.send((time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))

    child = multiprocessing.get_context("fork").Process(target=measured)
    child.start()
    seconds, peak = pipe.recv()
    child.join()
    size = sum(f.stat().st_size for f in folder.iterdir())
    data = DataConfig(dataset="kuairand", data_path=str(tmp_path))
    dataset = load_dataset(data, ModelConfig(), seed=1)
    source = dataset.batches(0, 1)
    next(source)
    started = time.perf_counter()
    for _ in range(200):
        next(source)
    per_second = 200 / (time.perf_counter() - started)
    with capsys.disabled():
        print(
            f"\n{ROWS / 1e6:.0f} M rows, {csv_bytes / 1e9:.2f} GB of CSV: {ROWS / seconds / 1e3:.0f} thousand rows/s, "
            f"peak {peak / 1e9:.2f} GB, {size / 1e6:.0f} MB on disk ({size / ROWS:.1f} bytes a row), "
            f"{dataset.items / 1e6:.1f} M videos, {per_second:.0f} batches/s of {data.batch_size}"
        )
    assert peak <= 1.5e9
    assert int(dataset.lengths.sum()) + dataset.users == ROWS
    assert per_second >= 20  # the dense step of the default configuration takes more than 50 ms here
