"""The conditions that a grid may put on its points: a small language of comparisons. No code is executed."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from slurm.toml_lines import nearest


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Whether a condition such as ``workers <= 8 or method == "nestpipe"`` is true for ``values``.

    It may have comparisons, and, or, not, in, and whole-number arithmetic. Raises ValueError for anything else.
    """
    try:
        return bool(_value(ast.parse(condition, mode="eval").body, values))
    except SyntaxError:
        raise ValueError(f"'{condition}' is not a condition") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"'{condition}': {error}") from None


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


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in values:
            return values[node.id]
        case ast.Name():
            raise ValueError(f"unknown name '{node.id}'; {nearest(node.id, list(values))}")
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
