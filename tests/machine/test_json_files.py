"""What is written is valid JSON, and what is read is bounded, whoever wrote it."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest

from nestpipe.machine.json_files import MAX_BYTES, MAX_DEPTH, json_text, numbers, read_json
from tests.support.imports import modules

#: Modules whose JSON never reaches a file for others: digests, arguments of a process, meta data of integers.
PRIVATE = {
    "nestpipe.machine.json_files",
    "nestpipe.datasets.kuairand",
    "nestpipe.datasets.kuairand_convert",
    "nestpipe.measurement.record",
    "nestpipe.ranks.pool",
    "nestpipe.ranks.rank",
    "nestpipe.training.checkpoint",
    "nestpipe.training.convergence",
    "nestpipe.training.manifest",
    "results.experiments.plan",
    "results.frames.frames",
    "slurm.point",
}


def strict(text: str):
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null_wherever_they_are():
    data = {"a": [1.0, math.nan, (math.inf, {"b": np.float64("-inf")})], "c": "NaN", "d": 10**300}
    assert strict(json_text(data)) == {"a": [1.0, None, [None, {"b": None}]], "c": "NaN", "d": 10**300}
    assert np.isnan(numbers([1.0, None])).tolist() == [False, True]


def test_every_file_of_json_is_written_by_one_function():
    users = {name for name, path in modules().items() if "json.dumps(" in path.read_text()}
    assert users <= PRIVATE, "use nestpipe.machine.json_files.json_text"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested more than"),
        (b"[" * 100_000, "nested more than"),
        (b'{"n": ' + b"9" * 400 + b"}", "is too large"),
        (rb'{"method": "a\ud800"}', "half a character"),
        (b"\xff\xfe\x00", "decode"),
        (b"", "Expecting value"),
    ],
)
def test_what_would_break_a_reader_later_is_refused_in_one_line(tmp_path, content, why):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why) as error:
        read_json(path)
    assert "\n" not in str(error.value)


def test_files_without_an_end_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    for name, why in {"pipe": "not a regular file", "zero": "not a regular file", "large": "more than 64 MiB"}.items():
        with pytest.raises(ValueError, match=why):
            read_json(tmp_path / name)


def test_what_is_plain_is_read_as_it_is(tmp_path):
    path = tmp_path / "x.json"
    for text in ('{"a": [1, 2.5, null, "ü"]}', "[" * MAX_DEPTH + "]" * MAX_DEPTH, "\ufeff{}"):
        path.write_text(text, encoding="utf-8")
        assert read_json(path) == json.loads(text.lstrip("\ufeff"))
