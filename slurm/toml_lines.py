"""Reads a TOML file and remembers the line of each key."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class GridError(ValueError):
    """A grid that cannot be used. One line: file, line, what is wrong, what to do."""


@dataclass(frozen=True)
class Source:
    """``tables``: what the file says. ``lines``: the line of each key, by (table, index in its array, key)."""

    path: Path
    tables: Mapping[str, Any]
    lines: Mapping[tuple[str, int, str], int]

    def error(self, text: str, table: str = "", index: int = 0, key: str = "") -> GridError:
        """``text`` with the file and the line of ``key`` in [table], or else of the table's header."""
        line = self.lines.get((table, index, key), self.lines.get((table, index, ""), 1))
        return GridError(f"{self.path}:{line}: {text}")

    def check_keys(self, table: str, index: int, values: Mapping[str, Any], known: Collection[str]) -> None:
        """Raises GridError for a key that is not in ``known``."""
        for key in values:
            if key not in known:
                raise self.error(f"unknown key '{key}' in [{table}]; {nearest(key, known)}", table, index, key)


def nearest(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"the known ones are {', '.join(known)}"


def read_source(path: Path) -> Source:
    """Raises GridError for a file that does not exist or is not TOML."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise GridError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise GridError(f"{path}: is not UTF-8 text: {error.reason}") from None
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(where[1]) if where else text.count("\n") + 1
        raise GridError(f"{path}:{line}: not TOML: {str(error).split(' (at ')[0]}") from None
    return Source(path, tables, _line_numbers(text))


def _line_numbers(text: str) -> dict[tuple[str, int, str], int]:
    """The line of each key, which tomllib does not give. A grid's tables are flat, so keys start a line."""
    lines: dict[tuple[str, int, str], int] = {}
    seen: dict[str, int] = {}
    table, index = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*(\[\[?)\s*([\w.-]+)\s*\]", line):
            table = head[2]
            index = seen[table] = seen.get(table, -1) + 1 if head[1] == "[[" else 0
            lines.setdefault((table, index, ""), number)
        elif key := re.match(r"\s*[\"']?([\w.-]+)[\"']?\s*=", line):
            lines.setdefault((table, index, key[1]), number)
    return lines
