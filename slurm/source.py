"""A TOML file that remembers its lines, and the conditions that a grid may put on its points."""

from __future__ import annotations

import ast
import difflib
import operator
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class GridError(ValueError):
    """A grid that cannot be used. One line: file, line, what is wrong, what to do."""


@dataclass(frozen=True)
class Source:
    """``tables``: what the file says. ``lines``: where each key stands, by (table, index in its array, key)."""

    path: Path
    tables: Mapping[str, Any]
    lines: Mapping[tuple[str, int, str], int]

    def error(self, text: str, table: str = "", index: int = 0, key: str = "") -> GridError:
        """``text`` with the file and the line of ``key`` in [table], or of the table's head without a key."""
        line = self.lines.get((table, index, key), self.lines.get((table, index, ""), 1))
        return GridError(f"{self.path}:{line}: {text}")

    def check_keys(self, table: str, index: int, values: Mapping[str, Any], known: Collection[str]) -> None:
        """Raises GridError for a key that is none of ``known``."""
        for key in values:
            if key not in known:
                raise self.error(f"unknown key '{key}' in [{table}]; {_nearest(key, known)}", table, index, key)


def _nearest(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known are {', '.join(known)}"


def read_source(path: Path) -> Source:
    """Raises GridError for a file that is not there or not TOML."""
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
        raise GridError(f"{path}:{line}: no TOML: {str(error).split(' (at ')[0]}") from None
    return Source(path, tables, _line_numbers(text))


def _line_numbers(text: str) -> dict[tuple[str, int, str], int]:
    """tomllib gives no positions. Keys of the flat tables that a grid has are at the start of a line."""
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


_OPERATIONS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Whether a condition such as ``workers <= 8 or method == "nestpipe"`` is true of ``values``.

    Comparisons, and, or, not, in, whole-number arithmetic; nothing is executed. Raises ValueError for anything else.
    """
    try:
        return bool(_value(ast.parse(condition, mode="eval").body, values))
    except SyntaxError:
        raise ValueError(f"'{condition}' is no condition") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"'{condition}': {error}") from None


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in values:
            return values[node.id]
        case ast.Name():
            raise ValueError(f"unknown name '{node.id}'; {_nearest(node.id, list(values))}")
        case ast.List() | ast.Tuple():
            return [_value(part, values) for part in node.elts]
        case ast.BoolOp():
            parts = (bool(_value(part, values)) for part in node.values)
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        case ast.UnaryOp() if type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](_value(node.operand, values))
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](_value(node.left, values), _value(node.right, values))
        case ast.Compare() if all(type(op) in _OPERATIONS for op in node.ops):
            row = [_value(part, values) for part in (node.left, *node.comparators)]
            return all(_OPERATIONS[type(op)](a, b) for op, a, b in zip(node.ops, row, row[1:], strict=False))
    raise ValueError("only comparisons, and, or, not, in and whole-number arithmetic are allowed")
