"""JSON that every reader understands, and reading of JSON files that anybody may have made.

JSON has no NaN and no infinity: a number that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: What no file of this project comes near: records take kilobytes, curves and timelines some megabytes.
MAX_BYTES = 64 << 20
MAX_DEPTH = 32
#: Digits of the largest integer that fits in a float.
_MAX_DIGITS = 308


def json_text(data: Any, **layout: Any) -> str:
    """``data`` as JSON, with null for numbers that are not finite. ``layout``: options of ``json.dumps``."""
    try:
        return json.dumps(data, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_finite(data), allow_nan=False, **layout)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def numbers(values: Sequence[float | None]) -> list[float]:
    """``values`` as they were before they were written: null stands for a number that was not finite."""
    return [math.nan if value is None else value for value in values]


def read_json(path: Path) -> Any:
    """What the file holds. Raises OSError, or ValueError with the reason in one line, for a file that is not JSON in
    UTF-8, is no regular file, or is beyond MAX_BYTES, MAX_DEPTH, the range of a float, or the characters of UTF-8."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")  # a pipe may never end
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
    try:
        data = json.loads(content.decode("utf-8-sig"), parse_int=_integer)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    _require_plain(data, MAX_DEPTH)
    return data


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"the number {digits[:20]}... is too large")
    return int(digits)


def _require_plain(data: Any, depth: int) -> None:
    if isinstance(data, str):
        if not data.isascii():
            try:
                data.encode()
            except UnicodeEncodeError:
                raise ValueError(f"the text {data[:40]!a} has half a character") from None
    elif isinstance(data, dict | list):
        if not depth:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        for value in (*data, *data.values()) if isinstance(data, dict) else data:
            if isinstance(value, str | dict | list):
                _require_plain(value, depth - 1)
