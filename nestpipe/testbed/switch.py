"""The switch between the hosts of a testbed: what it needs, compiling it, shaping links, finding running ones."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
from typing import Any

from nestpipe.machine.native import NotCompiled, compiled

SWITCH = "nestpipe-switch"
FALL_BACK = "or use --testbed loopback"
# Small segments interleave better on a slow link; the queue must hold what all peers may have in flight.
GSO_BYTES = 16384
QUEUE_BYTES = 16 << 20
BURST_BYTES = 32 << 10


class TestbedUnavailable(RuntimeError):
    """This machine cannot create the testbed; the message is one line: what, why, and what to do."""

    __test__ = False


def shape_lines(device: str, rate_bit_s: float) -> list[str]:
    """tc lines for one end of a link. Bare ACKs and ARP overtake data: two-way traffic would halve its rate."""
    rate = f"{rate_bit_s:.0f}bit"
    return [
        f"qdisc add dev {device} root handle 1: htb default 20",
        f"class add dev {device} parent 1: classid 1:20 htb rate {rate} ceil {rate} "
        f"burst {BURST_BYTES} cburst {BURST_BYTES} quantum 20000",
        f"class add dev {device} parent 1: classid 1:10 htb rate 10gbit ceil 10gbit quantum 20000",
        # IP packets shorter than 128 bytes: the upper nine bits of the length field are zero
        f"filter add dev {device} parent 1: protocol ip prio 1 u32 match u16 0 0xff80 at 2 flowid 1:10",
        f"filter add dev {device} parent 1: protocol arp prio 2 u32 match u32 0 0 flowid 1:10",
        f"qdisc add dev {device} parent 1:20 handle 20: bfifo limit {QUEUE_BYTES}",
    ]


def run_batch(namespace: str, tool: str, lines: list[str]) -> None:
    """Run ``lines`` with one call of ip or tc in a namespace. Raises TestbedUnavailable."""
    command = ["nsenter", f"--net={namespace}", tool, "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True)
    if done.returncode != 0:
        why = " ".join(done.stderr.split())
        raise TestbedUnavailable(
            f"cannot set up the testbed's links: {tool} says {why!r}; see `nestpipe doctor`, {FALL_BACK}"
        )


def require_switch(delay_s: float) -> str:
    """Path of the compiled switch. Raises TestbedUnavailable with the first thing that is missing."""
    if os.geteuid() != 0:
        raise TestbedUnavailable(
            f"a netns testbed creates network namespaces, which needs root: run as root, {FALL_BACK}"
        )
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            raise TestbedUnavailable(f"a netns testbed needs `{tool}`: apt install {package}, {FALL_BACK}")
    if delay_s > 0 and not os.path.exists("/dev/net/tun"):
        raise TestbedUnavailable(
            f"a link delay needs /dev/net/tun, which does not exist: modprobe tun (in a container, pass the "
            f"device in), {FALL_BACK}"
        )
    return str(compiled_switch())


def compiled_switch() -> pathlib.Path:
    """The switch, compiled once per version of its source into the user's cache. Raises TestbedUnavailable."""
    try:
        return compiled(pathlib.Path(__file__).with_name("switch.c"), ("-O2",))
    except NotCompiled as error:
        raise TestbedUnavailable(f"a netns testbed compiles a small C program: {error}, {FALL_BACK}") from None


def running_switches() -> list[dict[str, Any]]:
    """Every testbed of this machine: pid, hosts, delay_s, rate, owner ("persistent" or a process id)."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            if words[0] == SWITCH and len(words) == 6:
                found.append(
                    {"pid": int(entry.name), "hosts": int(words[1]), "delay_s": int(words[2]) / 1e6,
                     "rate": words[4], "owner": words[5]}
                )  # fmt: skip
    return sorted(found, key=lambda switch: switch["pid"])


def host_paths(switch: dict[str, Any]) -> list[str]:
    """Namespace paths of a running switch's hosts: its namespace descriptors in order, the last is its own."""
    folder = pathlib.Path(f"/proc/{switch['pid']}/fd")
    numbers = []
    with contextlib.suppress(OSError):
        numbers = sorted(int(d.name) for d in folder.iterdir() if os.readlink(d).startswith("net:["))
    return [f"{folder}/{number}" for number in numbers[: switch["hosts"]]]
