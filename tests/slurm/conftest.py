"""A faked Slurm and a real one, each with the folder of its sweep."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm.folder import SweepFolder
from tests.support.fake_slurm import FakeSlurm, install
from tests.support.local_slurm import Unavailable, cancel_everything, slurm_up
from tests.support.sweep_commands import GRID


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> FakeSlurm:
    """A faked Slurm first in PATH, and the small grid in the current folder."""
    fake, scripts = install(tmp_path)
    monkeypatch.setenv("PATH", f"{scripts}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text(GRID)
    return fake


@pytest.fixture
def sweep() -> SweepFolder:
    """The folder of the small grid's sweep."""
    return SweepFolder(Path("sweeps/grid"))


@pytest.fixture(scope="module")
def real_slurm(tmp_path_factory):
    """A Slurm on this machine: the folder of its files."""
    try:
        with slurm_up(tmp_path_factory.mktemp("slurm")) as base:
            yield base
    except Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture
def folder(real_slurm, tmp_path):
    """The folder of a sweep on the real Slurm, on which no other job runs."""
    cancel_everything()
    yield tmp_path / "sweep"
    cancel_everything()
