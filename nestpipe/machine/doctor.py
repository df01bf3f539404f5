"""What this machine can run: checks of versions, devices and tools, each with the fix if one is needed.

Nothing here needs more than the standard library, so ``python -m nestpipe.machine.doctor`` also explains an
installation that does not import.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import sys
import tempfile
from typing import Literal

from nestpipe.machine.versions import installed_versions, load_error, mismatch

Status = Literal["ok", "warn", "fail"]

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 9)
MIN_MEMORY_GIB = 4.0
MIN_TMP_GIB = 2.0
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding. "fail": nothing runs; "warn": something optional does not. ``fix`` is "" if none is needed."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def diagnose() -> list[Check]:
    """All checks, the required ones first. Raises nothing: an error during a check is a finding."""
    return [
        _python(),
        *_torch(),
        _torchrec(),
        _cores(),
        _memory(),
        _tmp(),
        *_testbed(),
        _slurm(),
    ]


def exit_code(checks: list[Check]) -> int:
    """1 when a check failed, else 0: warnings are about optional parts."""
    return int(any(check.status == "fail" for check in checks))


def plain_report(checks: list[Check]) -> str:
    """The report as text without colour."""
    lines = []
    for check in checks:
        lines.append(f"{check.status:4}  {check.name:14}  {check.detail}")
        lines += [f"      {'':14}  -> {line}" for line in check.fix.splitlines()]
    return "\n".join(lines)


def _python() -> Check:
    found = f"{platform.python_implementation()} {platform.python_version()}"
    if sys.version_info < MIN_PYTHON:
        return Check("Python", "fail", found, "make setup PYTHON=python3.12 (3.11 is the oldest that works)")
    return Check("Python", "ok", found)


def _torch() -> list[Check]:
    try:
        import torch  # here, since a torch that does not import is a finding
    except (ImportError, OSError) as error:
        return [Check("torch", "fail", f"does not import: {error}", "make setup, or pip install torch")]
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    numbers = tuple(int(part) for part in torch.__version__.partition("+")[0].split(".")[:2])
    if numbers < MIN_TORCH:
        version = Check("torch", "fail", f"{torch.__version__}, {build}", "pip install 'torch>=2.9'")
    elif torch.version.cuda and not torch.cuda.is_available():
        version = Check(
            "torch", "ok", f"{torch.__version__}, {build} on a machine without CUDA (it runs; the CPU build is smaller)"
        )
    else:
        version = Check("torch", "ok", f"{torch.__version__}, {build}")
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        backends = Check("backends", "fail", "this torch has no gloo", "install a torch built with distributed")
    else:
        nccl = dist.is_nccl_available()
        backends = Check("backends", "ok", "gloo and NCCL" if nccl else "gloo; NCCL comes with CUDA builds")
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
    return [version, backends, Check("devices", "ok", found or "CPU only")]


def _torchrec() -> Check:
    versions = installed_versions()
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if versions["torchrec"] == "not installed":
        return Check(
            "torchrec", "warn", f"{found}: NestPipe runs, the TorchRec baselines do not", "make setup, or pip install "
            "'nestpipe[torchrec]'"
        )  # fmt: skip
    if mismatch(versions):
        return Check("torchrec", "fail", f"{found}: they do not match", "make clean setup (installs the tested set)")
    if error := load_error("fbgemm_gpu", "torchrec"):
        return Check(
            "torchrec", "fail", f"{found}: does not load ({str(error).splitlines()[0]})",
            "make clean setup; without CUDA, do not install the CUDA build fbgemm-gpu next to fbgemm-gpu-cpu",
        )  # fmt: skip
    return Check("torchrec", "ok", found)


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    detail = f"{cores} of {os.cpu_count()} for this process, load {load:.1f}"
    if load > cores:
        return Check("cores", "warn", detail, "other work is running: times measured now will be too long")
    if cores < 2:
        return Check("cores", "warn", detail, "overlap of compute and communication needs at least two cores")
    return Check("cores", "ok", detail)


def _memory() -> Check:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024 / GIB
    detail = f"{free:.1f} GiB available of {total:.1f}"
    if free < MIN_MEMORY_GIB:
        return Check("memory", "warn", detail, "use fewer workers or smaller tables")
    return Check("memory", "ok", detail)


def _tmp() -> Check:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free / GIB
    detail = f"{free:.1f} GiB free in {folder}"
    if free < MIN_TMP_GIB:
        return Check("disk", "warn", detail, f"free some space, or set TMPDIR to a folder with {MIN_TMP_GIB:g} GiB")
    return Check("disk", "ok", detail)


def _testbed() -> list[Check]:
    tools = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "gcc": "gcc libc6-dev"}
    missing = [tool for tool in tools if shutil.which(tool) is None]
    packages = " ".join(dict.fromkeys(tools[tool] for tool in missing))
    if missing:
        found = Check("testbed tools", "warn", f"missing: {', '.join(missing)}", f"apt install {packages}")
    else:
        found = Check("testbed tools", "ok", ", ".join(tools))
    loopback = "runs on --testbed loopback work; shaped links (--testbed netns:...) do not"
    if os.geteuid() != 0:
        return [found, Check("namespaces", "warn", f"not root: {loopback}", "run as root for shaped links")]
    # Bits of the capabilities that are needed to create and connect namespaces.
    needed = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
    with open("/proc/self/status") as lines:
        effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    lacking = [name for name, bit in needed.items() if not effective >> bit & 1]
    if not os.path.exists("/dev/net/tun"):
        lacking.append("/dev/net/tun")
    if lacking:
        fix = "start the container with these, or modprobe tun for the device"
        return [found, Check("namespaces", "warn", f"root without {', '.join(lacking)}: {loopback}", fix)]
    return [found, Check("namespaces", "ok", "root, with what shaped links need")]


def _slurm() -> Check:
    present = [tool for tool in ("sinfo", "sbatch", "squeue", "sacct") if shutil.which(tool)]
    if {"sinfo", "sbatch"} <= set(present):
        return Check("Slurm", "ok", ", ".join(present))
    return Check("Slurm", "warn", "no sinfo or sbatch: sweeps run only on this machine", "apt install slurm-client")


if __name__ == "__main__":
    findings = diagnose()
    print(plain_report(findings))
    sys.exit(exit_code(findings))
