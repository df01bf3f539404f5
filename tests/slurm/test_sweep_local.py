"""Sweeps on this machine with real ranks: executors agree, jobs end with the command, signals reach all ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nestpipe.measurement.record import Store
from slurm.collect import collect
from slurm.flag_agreement import FlagAgreement
from slurm.folder import SweepFolder
from slurm.preemption import NOTHING, SAVE_AND_STOP, Flag
from slurm.status import counts, point_states
from tests.support.paths import ROOT
from tests.support.sweep_commands import GRID, nestpipe


def test_local_and_debug_executors_give_equal_losses(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one = GRID.replace("[2, 4]", "[2]").replace("[8, 16]", "[8]").replace('["serial", "nestpipe"]', '["nestpipe"]')
    Path("grid.toml").write_text(one)
    losses = []
    for executor in ("local", "debug"):
        status, out, err = nestpipe(capsys, "submit", "grid.toml", "--executor", executor, "--folder", executor)
        assert status == 0 and "1 points: 1 done" in out, out + err
        assert nestpipe(capsys, "collect", executor, "--store", f"{executor}-store")[0] == 0
        (found,), _ = Store(Path(f"{executor}-store")).read()
        assert found.provenance["sweep"]["point"] == SweepFolder(Path(executor)).points()[0].path.name
        losses.append(found.losses)
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_local_jobs_end_with_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = "steps = 400\npace_dense = 50.0"
    Path("grid.toml").write_text(GRID.replace("steps = 2", more) + 'setup = ["true"]\n')
    root = ROOT
    command = [sys.executable, "-m", "nestpipe.cli", "sweep", "submit", "grid.toml"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(root)}, stderr=subprocess.DEVNULL) as process:
        sweep = SweepFolder(Path("sweeps/grid"))
        deadline = time.monotonic() + 120
        while not any(s.state == "running" and s.detail.startswith("step") for s in point_states(sweep)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        process.terminate()
    assert process.returncode == 143
    # A job may have just enough time to report that one of its ranks was ended.
    assert re.fullmatch(r"8 points: 6 missing, (2 lost|1 failed, 1 lost|2 failed)", counts(point_states(sweep)))
    mark = str(sweep.logs.absolute()).encode()
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark in p.read_bytes()]
    assert not left


@pytest.mark.slow
def test_a_local_job_that_reaches_its_time_limit_continues(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one = GRID.replace("[2, 4]", "[2]").replace("[8, 16]", "[8]").replace('["serial", "nestpipe"]', '["nestpipe"]')
    # The signal comes 20 s after the start of the processes. Training gets only a part of that: a run needs several.
    limit = "time = 1\nsignal_delay_s = 40\nmax_timeouts = 5\n"
    Path("grid.toml").write_text(one.replace("steps = 2", "steps = 180\npace_dense = 100.0") + limit)
    for folder, words in (("limited", []), ("free", ["--time", "20"])):
        status, out, err = nestpipe(capsys, "submit", "grid.toml", "--folder", folder, *words)
        assert status == 0, out + err
        collect(SweepFolder(Path(folder)), Path(folder) / "store")
    (limited,), (free,) = (Store(Path(f) / "store").read()[0] for f in ("limited", "free"))
    assert limited.losses == free.losses and len(free.losses) == 184
    assert len(limited.steps) < len(free.steps)  # steps before the last start have no times
    assert "resuming after step" in "".join(p.read_text() for p in Path("limited/logs").glob("*_0_log.out"))


def flags_of_a_signalled_rank(signalled: int, at: int) -> list[int]:
    import torch.distributed as dist

    before = signal.getsignal(signal.SIGUSR2), signal.getsignal(signal.SIGTERM)
    flag, agreement, seen = Flag(), FlagAgreement(), []
    for step in range(6):
        if dist.get_rank() == signalled and step == at:
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGTERM)
        seen.append(agreement.of_all(flag.take()))
    agreement.close()
    signal.signal(signal.SIGUSR2, before[0])
    signal.signal(signal.SIGTERM, before[1])
    return seen


@pytest.mark.parametrize("signalled", [0, 1])
def test_all_ranks_hear_of_a_signal_to_one_in_the_same_step(pool2, signalled):
    answers = pool2.run(flags_of_a_signalled_rank, signalled, 2)
    assert answers == [[NOTHING] * 3 + [SAVE_AND_STOP] + [NOTHING] * 2] * 2
