"""Reading MovieLens: strict about rows, exact about the split."""

import numpy as np
import pytest

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.data import DataError
from nestpipe.data.text_blocks import blocks
from nestpipe.datasets.loader import load_dataset
from tests.support.paths import MOVIELENS
from tests.support.popularity import popularity_hit_rate

GOOD = "1\t10\t5\t100\n1\t30\t3\t50\n2\t20\t1\t7\n1\t20\t4\t100\n2\t10\t2.5\t6\n"


def load(path, on_bad_row="error", windows="all"):
    config = DataConfig(dataset="movielens", data_path=str(path), on_bad_row=on_bad_row, windows=windows)
    return load_dataset(config, ModelConfig(), seed=1)


def test_split_leaves_out_the_last_item_in_time_and_ties_in_file_order(tmp_path):
    (tmp_path / "u.data").write_text(GOOD)
    dataset = load(tmp_path)
    assert (dataset.users, dataset.items) == (2, 3)
    assert dataset.lengths.tolist() == [2, 1]
    assert dataset.test_items.tolist() == [1, 1]  # item 20, for both
    items, times = dataset.read(np.array([0, 1]), np.array([0, 0]), dataset.lengths)
    assert items.tolist() == [2, 0, 0] and times.tolist() == [50, 100, 6]
    assert dataset.bad_rows == 0


@pytest.mark.parametrize("layout", ["ratings.dat", "ratings.csv"])
def test_other_layouts_are_the_same_data(tmp_path, layout):
    (tmp_path / "u.data").write_text(GOOD)
    (tmp_path / "other").mkdir()
    rows = GOOD.replace("\t", "::" if layout == "ratings.dat" else ",").replace("2.5", "0.5")
    header = "userId,movieId,rating,timestamp\n" if layout == "ratings.csv" else ""
    (tmp_path / "other" / layout).write_text(header + rows.replace("30", "193609"))
    one, other = load(tmp_path), load(tmp_path / "other")
    assert other.bad_rows == 0 and other.lengths.tolist() == one.lengths.tolist() and other.items == 3
    everything = (np.arange(2), np.zeros(2, dtype=np.int64), one.lengths)
    assert [x.tolist() for x in one.read(*everything)] == [x.tolist() for x in other.read(*everything)]


def test_blocks_do_not_show(tmp_path, monkeypatch):
    (tmp_path / "u.data").write_text(GOOD * 7 + "broken\n" + GOOD)
    whole = load(tmp_path, "skip")
    monkeypatch.setattr("nestpipe.datasets.movielens.blocks", lambda path: blocks(path, size=16))
    pieces = load(tmp_path, "skip")
    assert pieces.bad_row_examples == whole.bad_row_examples and ":36: " in whole.bad_row_examples[0]
    assert pieces.lengths.tolist() == whole.lengths.tolist()


@pytest.mark.parametrize("text", [GOOD.replace("\n", "\r\n"), GOOD.rstrip("\n")], ids=["crlf", "no end of line"])
def test_line_ends_do_not_matter(tmp_path, text):
    (tmp_path / "ratings").write_bytes(text.encode())
    assert load(tmp_path / "ratings").lengths.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("1\t2\t3", "3 tab-separated fields, expected 4"),
        ("1 2 3 4", "1 tab-separated fields, expected 4"),
        ("1\t2\t3\t4\t5", "5 tab-separated fields, expected 4"),
        ("", "empty line"),
        ("x1\t2\t3\t4", "user id 'x1' is not a number"),
        ("1\t2.5\t3\t4", "item id '2.5' is not a number"),
        ("1\t-2\t3\t4", "item id -2 is negative"),
        ("1\t2\tgood\t4", "rating 'good' is not a number"),
        ("1\t2\t3\t", "timestamp '' is not a number"),
        ("1\t2\t3\t9999999999999999999", "timestamp 9999999999999999999 is too large"),
        ("1\t2\t3\t4\r5", "timestamp"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_remedy_or_counted(tmp_path, row, complaint):
    path = tmp_path / "u.data"
    path.write_bytes((GOOD + row + "\n" + GOOD).encode())
    with pytest.raises(DataError) as error:
        load(path)
    message = str(error.value)
    assert message.startswith(f"{path}:6: ") and complaint in message and "--on-bad-row skip" in message
    assert "\n" not in message and "\r" not in message
    dataset = load(path, "skip")
    assert dataset.bad_rows == 1 and dataset.lengths.tolist() == [5, 3]
    assert complaint in dataset.bad_row_examples[0] and ":6:" in dataset.bad_row_examples[0]


def test_only_the_first_few_bad_rows_are_remembered(tmp_path):
    (tmp_path / "u.data").write_text("bad\n" * 20 + GOOD)
    dataset = load(tmp_path, "skip")
    assert dataset.bad_rows == 20 and len(dataset.bad_row_examples) == 5


@pytest.mark.parametrize("text", ["", "\n", "no\nrow\n"])
def test_a_file_without_a_usable_row_is_an_error_even_when_skipping(tmp_path, text):
    (tmp_path / "u.data").write_text(text)
    with pytest.raises(DataError, match=r"u\.data"):
        load(tmp_path, "skip")


def test_a_missing_file_and_a_missing_path_say_what_to_pass(tmp_path):
    with pytest.raises(DataError, match=r"no such file.*--data-path"):
        load(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"--data-path"):
        load_dataset(DataConfig(dataset="movielens"), ModelConfig(), seed=1)


@pytest.fixture(scope="module")
def real():
    if not MOVIELENS.exists():
        pytest.skip("MovieLens 100K is not here; set NESTPIPE_ML100K to its folder")
    return load(MOVIELENS, "skip")


def test_the_real_file(real):
    assert (real.users, real.items) == (943, 1682)
    assert real.bad_rows + int(real.lengths.sum()) + 943 == 100_000
    assert real.lengths.min() >= 18


def test_popularity_on_the_real_file(real):
    assert popularity_hit_rate(real) == pytest.approx(0.086, abs=0.001)
