"""The doctor names what is wrong and the fix, and fails only if nothing would run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from nestpipe.commands.doctor import as_table
from nestpipe.machine import doctor
from nestpipe.machine.doctor import Check, diagnose, exit_code, plain_report

REQUIRED = {"Python", "torch", "backends"}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_machine_can_run_nestpipe():
    checks = by_name(diagnose())
    assert {name: checks[name].status for name in REQUIRED} == dict.fromkeys(REQUIRED, "ok")
    assert all(check.fix for check in checks.values() if check.status != "ok")


def test_torchrec_mismatch_names_the_three_versions(monkeypatch):
    monkeypatch.setattr(
        doctor, "installed_versions", lambda: {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm": "1.9.0"}
    )
    checks = diagnose()
    check = by_name(checks)["torchrec"]
    assert check.status == "fail" and exit_code(checks) == 1
    assert all(part in check.detail for part in ("torch 2.13.0", "torchrec 1.8.0", "fbgemm 1.9.0"))
    assert "make clean setup" in check.fix


def test_no_torchrec_is_a_warning(monkeypatch):
    absent = dict.fromkeys(("torch", "torchrec", "fbgemm"), "not installed")
    monkeypatch.setattr(doctor, "installed_versions", lambda: absent)
    assert by_name(diagnose())["torchrec"].status == "warn"


def test_missing_tools_name_their_packages(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    checks = by_name(diagnose())
    assert checks["testbed tools"].fix == "apt install iproute2 util-linux gcc libc6-dev"
    assert checks["Slurm"].status == "warn"


def test_not_root_is_a_warning(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    check = by_name(diagnose())["namespaces"]
    assert check.status == "warn" and "loopback" in check.detail


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code(status, code):
    assert exit_code([Check("a", "ok", ""), Check("b", status, "", "mend it")]) == code


def test_reports(capsys):
    checks = [Check("torch", "fail", "does not import [x]", "make setup")]
    assert plain_report(checks).splitlines() == [
        "fail  torch           does not import [x]",
        "                      -> make setup",
    ]
    Console().print(as_table(checks))
    shown = capsys.readouterr().out
    assert "does not import [x]" in shown and "-> make setup" in shown


def test_torchrec_that_does_not_load_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    monkeypatch.setattr(
        doctor, "installed_versions", lambda: {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm": "1.8.0"}
    )
    check = by_name(diagnose())["torchrec"]
    assert check.status == "fail" and "does not load" in check.detail and "fbgemm-gpu-cpu" in check.fix


def test_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "nestpipe.machine.doctor"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0 and "torch" in done.stdout, done.stdout + done.stderr
