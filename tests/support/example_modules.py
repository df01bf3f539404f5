"""Modules of examples/, which is a folder of scripts and not a package."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


def example(name: str) -> ModuleType:
    """examples/NAME.py, which may import its neighbours as it does when it runs."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)
