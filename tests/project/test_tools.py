"""The help of each tool explains it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize("tool", ["adoption_price", "kill_and_resume", "step_overhead"])
def test_help_says_what_a_tool_does_and_how_to_run_it(tool):
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and f"tools/{tool}.py" in done.stdout and "options:" in done.stdout
