"""Rows of KuaiRand's logs: bad rows are named or counted, harmless forms are read, and no text is misread."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nestpipe.data import DataError
from nestpipe.data.text_blocks import BadRows
from nestpipe.datasets.kuairand_rows import read_log
from tests.support.kuairand_logs import COLUMNS, GOOD, load, row, write

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


def plain(text: bytes, columns: int = 19) -> tuple[list[tuple[int, int, int]], int]:
    """The rows that are good by the rules that the module states, read line by line, and the number of other rows."""
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
