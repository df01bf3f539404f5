"""``nestpipe methods``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from nestpipe.methods import find_method, known_methods


@dataclass(frozen=True)
class Methods:
    """List the installed training methods, and which method of the paper each one corresponds to."""


def main(arguments: Sequence[str]) -> int:
    tyro.cli(Methods, prog="nestpipe methods", args=arguments)
    names = known_methods()
    width = max(map(len, names))
    for name in names:
        try:
            method = find_method(name)
        except ValueError as error:
            print(f"{name:<{width}} {error}")
            continue
        print(f"{name:<{width}} {method.summary}" + (f" [paper: {method.paper_method}]" if method.paper_method else ""))
    return 0
