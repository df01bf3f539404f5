"""KuaiRand's logs: same histories however the rows lie about, strict about rows, clean after an interruption."""

from __future__ import annotations

import contextlib
import csv
import io
import multiprocessing
import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.data import DataError
from nestpipe.data.text_blocks import BadRows
from nestpipe.datasets import kuairand_convert
from nestpipe.datasets.kuairand import converted_folder, find_logs
from nestpipe.datasets.kuairand_convert import VideosSeen, convert
from nestpipe.datasets.kuairand_rows import read_log
from nestpipe.datasets.loader import load_dataset

COLUMNS = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)


def row(user, video, time_ms) -> str:
    return f"{user},{video},20220408,1200,{time_ms}" + ",0" * 13 + ",1"


def write(folder: Path, **files: list[str]) -> Path:
    for name, lines in files.items():
        (folder / f"log_standard_{name}.csv").write_text("\n".join([COLUMNS, *lines]) + "\n")
    return folder


def load(folder: Path, on_bad_row="error", **options):
    data = DataConfig(dataset="kuairand", data_path=str(folder), on_bad_row=on_bad_row, **options)
    return load_dataset(data, ModelConfig(sequence_length=4), seed=1)


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


def test_changed_logs_are_converted_anew(tmp_path):
    write(tmp_path, a=[row(1, 1, 1), row(1, 2, 2)])
    assert load(tmp_path).items == 2
    write(tmp_path, a=[row(1, 1, 1), row(1, 2, 2), row(1, 3, 3)])
    assert load(tmp_path).items == 3


def when_it_advances(stage, act):
    """In place of the progress bar of a conversion: ``act`` is called when ``stage`` has got a first part done."""

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


GOOD = [row(1, 10, 1), row(1, 11, 2), row(2, 10, 3)]
BAD = {
    "missing column": (row(1, 2, 3).rpartition(",")[0], "18 fields, expected 19"),
    "extra column": (row(1, 2, 3) + ",5", "20 fields, expected 19"),
    "text in a number": (row(1, "abc", 3), "video_id 'abc' is not a whole number"),
    "decimal": (row(1, "1.5", 3), "video_id '1.5' is not a whole number"),
    "hexadecimal": (row(1, "0x1F", 3), "video_id '0x1F' is not a whole number"),
    "padded": (row(1, " 12", 3), "is not a whole number"),
    "empty field": (row("", 2, 3), "user_id '' is not a whole number"),
    "negative id": (row(-1, 2, 3), "user_id -1 is negative"),
    "too large": (row(1, 2, 10**19), "time_ms 10000000000000000000 is too large"),
    "second header": (COLUMNS, "a second header"),
    "empty line": ("", "empty line"),
    "other encoding": ("café" + row(1, 2, 3), "not UTF-8"),
    "broken quote": ('"1' + row(1, 2, 3), "broken quotes"),
    "truncated": (row(1, 2, 3)[:16], "4 fields, expected 19"),
}


@pytest.mark.parametrize("last", [False, True], ids=["inside", "last line"])
@pytest.mark.parametrize(("line", "complaint"), BAD.values(), ids=BAD)
def test_a_bad_row_is_named_with_file_and_line_or_counted(tmp_path, line, complaint, last):
    lines = [*GOOD, line] if last else [*GOOD[:2], line, *GOOD[2:]]
    path = tmp_path / "log_standard_x.csv"
    path.write_bytes("\n".join([COLUMNS, *lines, ""])[: None if not line or not last else -1].encode("latin-1"))
    with pytest.raises(DataError) as error:
        load(tmp_path)
    text = str(error.value)
    assert text.startswith(f"{path}:{5 if last else 4}: ") and complaint in text and "--on-bad-row skip" in text
    assert "\n" not in text and not list(tmp_path.glob(".nestpipe-*.partial"))
    dataset = load(tmp_path, "skip")
    assert dataset.bad_rows == 1 and complaint in dataset.bad_row_examples[0]
    assert dataset.lengths.tolist() == [1, 0]
    with pytest.raises(DataError, match="1 bad rows were skipped when"):  # the converted form remembers
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "users"),
    [
        (lambda text: text.replace(b"\n", b"\r\n"), 2),
        (lambda text: text.removesuffix(b"\n"), 2),
        (lambda text: b"\xef\xbb\xbf" + text, 2),
        (lambda text: text.replace(b"1,10,", b'"1","10",'), 2),
        (lambda text: text.replace(b",tab\n", b",tab,more\n").replace(b",1\n", b",1,7\n"), 2),
    ],
    ids=["CRLF", "no end of line", "byte order mark", "quoted", "one more column everywhere"],
)
def test_harmless_forms_are_read(tmp_path, change, users):
    path = write(tmp_path, x=GOOD) / "log_standard_x.csv"
    path.write_bytes(change(path.read_bytes()))
    dataset = load(tmp_path)
    assert dataset.users == users and dataset.bad_rows == 0 and dataset.lengths.tolist() == [1, 0]


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no log_standard\*\.csv there"):
        load(tmp_path)
    path = tmp_path / "log_standard_x.csv"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"x\.csv:1: the file is empty"):
        load(tmp_path)
    with pytest.raises(DataError, match=r"none of 1 rows is usable"):
        load(tmp_path, "skip")
    path.write_bytes("\n".join([COLUMNS, *GOOD]).encode("utf-16"))
    with pytest.raises(DataError, match=r"x\.csv:1: the header lacks user_id.*UTF-8"):
        load(tmp_path)
    path.write_text("\n".join([COLUMNS.replace("video_id", "item"), *GOOD]))
    with pytest.raises(DataError, match=r"x\.csv:1: the header lacks video_id"):
        load(tmp_path, "skip")
    path.write_text(COLUMNS + "\n")
    with pytest.raises(DataError, match="there is no row"):
        load(tmp_path)


def test_a_file_that_vanishes_or_grows_meanwhile(tmp_path, monkeypatch):
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


def plain(text: bytes, columns: int = 19) -> tuple[list[tuple[int, int, int]], int]:
    """The rows that are good by the rules as the module states them, one line after the other, and how many are not."""
    good, bad = [], 0
    lines = text.replace(b"\r\n", b"\n").split(b"\n")[1:]
    if lines and not lines[-1]:
        lines.pop()
    for line in lines:
        try:
            fields = next(csv.reader(io.StringIO(line.decode()), strict=True), [])
            used = [fields[n] for n in (0, 1, 4)] if len(fields) == columns else [""]
            digits = [f.removeprefix("-") for f in used]
            fine = all(f.isascii() and f.isdigit() and len(f.lstrip("0")) <= 18 for f in digits)
            fine = fine and all(int(f) >= 0 for f in used)
        except (UnicodeDecodeError, csv.Error):
            fine = False
        if fine:
            good.append(tuple(map(int, used)))
        else:
            bad += 1
    return good, bad


FIELD = st.one_of(
    st.integers(0, 10**6).map(str),
    st.sampled_from(
        ["-5", "-0", "1" * 18, "1" * 19, "0" * 20 + "7", "+3", "x", "", " 4", "0x10", "1e3", "NA", '"12"', '"', "٣"]
    ),
)
LINE = st.one_of(
    st.lists(FIELD, min_size=19, max_size=19).map(",".join),
    st.tuples(FIELD, FIELD, FIELD).map(lambda t: row(*t)),
    st.lists(FIELD, max_size=22).map(",".join),
    st.sampled_from([COLUMNS, "", "\x00", "a\rb", row(3, 4, 5) + "\r", row(1, 1, 1) + " "]),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(LINE, min_size=1, max_size=12),
    st.booleans(),
    st.sampled_from([64, 300, 1 << 20]),
    st.sampled_from(["\n", "\r\n"]),
)
@example([row("0" * 20 + "7", 1, 1)], True, 300, "\n")
def test_any_text_is_read_as_the_plain_reader_reads_it(tmp_path_factory, lines, ended, size, end):
    """Every line is a row or counted, whatever the size of blocks: none is dropped, none made up."""
    path = tmp_path_factory.mktemp("fuzz") / "log_standard.csv"
    text = (end.join([COLUMNS, *lines]) + (end if ended else "")).encode("utf-8", "surrogateescape")
    path.write_bytes(text)
    bad = BadRows(True, DataError)
    pieces = list(read_log(path, bad, size))
    got = [
        r for piece in pieces for r in zip(*(x.tolist() for x in (piece.users, piece.videos, piece.times)), strict=True)
    ]
    good, count = plain(text)
    assert got == good and bad.count == count


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
