"""The origin of a record: versions, commit, host and command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """Versions, commit, host and the command that is running."""
    versions = {"python": platform.python_version()}
    for package in ("nestpipe", "torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    host = {"name": platform.node(), "cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.system()}
    return {"versions": versions, "commit": _commit(), "host": host, "command": shlex.join(command)}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """Commit of the checkout that this package runs from, with ``-dirty`` if files differ; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        run = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()
