"""An installed copy works without the checkout: every file that a command needs is in the wheel."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

TINY = shlex.split(
    "--workers 2 --steps 2 --rounds 1 --batch-size 8 --embedding-dim 8 --width 8 --heads 1 --dense-layers 1 "
    "--sequence-length 8 --negatives 4 --data-scale 0.00001 --micro-batches 2"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with only the wheel's contents. Its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # Built from a copy: an old build folder would add files to the wheel that are no longer in the checkout.
    kept_out = shutil.ignore_patterns(".*", "build", "out", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "source", ignore=kept_out)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), "./source"], check=True, cwd=folder)
    (wheel,) = folder.glob("nestpipe-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True, cwd=folder)
    return folder / "site"


@pytest.mark.parametrize(
    "words",
    [
        ["schedule", "nestpipe", "--check"],
        ["simulate", "--workers", "64"],
        ["simulate", "--hardware", "h100-ib", "--clustering", "off", "--workers", "64"],
        ["sweep", "preview", "smoke"],
        ["run", "--methods", "serial,nestpipe", "--clustering", *TINY],
        pytest.param(["run", "--methods", "nestpipe", "--testbed", "netns:200mbit,1ms", *TINY], marks=pytest.mark.root),
        ["reproduce", "--size", "tiny", "--only", "fig9"],
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_an_installed_copy_runs(installed: Path, tmp_path: Path, words: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = "import nestpipe, sys; print(nestpipe.__file__); from nestpipe.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-W", "error::UserWarning:nestpipe", "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert str(installed) in done.stdout.splitlines()[0]
    assert "slower numpy form" not in done.stderr and "loopback instead" not in done.stderr
