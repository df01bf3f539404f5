"""The project's own imports, read from its sources: every ``import`` counts, also those inside functions and those
under ``TYPE_CHECKING``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

PACKAGES = ("nestpipe", "baselines", "results", "slurm", "suites")


@dataclass(frozen=True)
class Import:
    """``source`` imports ``target``, both modules. ``late``: inside a function. ``reason``: the comment next to it."""

    source: str
    target: str
    line: int
    late: bool
    reason: str


def modules() -> dict[str, Path]:
    """Every module of the project by its name; a package is named as its folder."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "out" in path.relative_to(ROOT).parts:
                continue
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(known: dict[str, Path]) -> list[Import]:
    """All imports of one module of the project by another."""
    return [found for name, path in known.items() for found in _imports_of(name, path, known)]


def late_imports(known: dict[str, Path]) -> list[Import]:
    """All imports inside functions, of whatever package."""
    return [found for name, path in known.items() for found in _imports_of(name, path, None) if found.late]


def _imports_of(name: str, path: Path, known: dict[str, Path] | None) -> Iterator[Import]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    late = {id(inner) for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            targets = list(dict.fromkeys(_module(node.module, alias.name, known) for alias in node.names))
        else:
            continue
        reason = _comment(lines, node.lineno, node.end_lineno or node.lineno)
        for target in targets:
            if known is None or target in known:
                yield Import(name, target, node.lineno, id(node) in late, reason)


def _module(package: str, name: str, known: dict[str, Path] | None) -> str:
    """``from package import name``: the module ``package.name`` if there is one, else ``package``."""
    return f"{package}.{name}" if known and f"{package}.{name}" in known else package


def _comment(lines: list[str], first: int, last: int) -> str:
    """The comment on the lines of a statement, or on its own line just before."""
    for line in lines[first - 1 : last]:
        if "#" in line:
            return line.partition("#")[2].strip()
    before = lines[first - 2].strip() if first > 1 else ""
    return before[1:].strip() if before.startswith("#") else ""


def room(module: str, known: dict[str, Path]) -> str:
    """The folder of a module; a module that is directly in a package, without a folder, is its own room."""
    if known[module].name == "__init__.py":
        return module
    package = module.rpartition(".")[0]
    return module if package in ("nestpipe", "baselines", "results") else package


def circles(arrows: set[tuple[str, str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan)."""
    graph: dict[str, list[str]] = {}
    for a, b in sorted(arrows):
        graph.setdefault(a, []).append(b)
        graph.setdefault(b, [])
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = []
            while True:
                component.append(stack.pop())
                if component[-1] == node:
                    break
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found
